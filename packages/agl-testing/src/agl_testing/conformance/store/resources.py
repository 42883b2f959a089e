"""Resource versions, algorithm states, metrics and retention."""

# ruff: noqa: D102  # the names of the tests say what holds

import msgspec
import pytest

from agl.contracts import Metric, RolloutQuery, Store
from agl.errors import ConflictError, NotFoundError, StoreError
from agl.schemas import LLM, JsonResource, PromptTemplate, ResourceVersion, Weights
from agl_testing.conformance.store.case import store_test
from agl_testing.stores.samples import finish_one, make_rollout, start_one


def _version(version: str, *, name: str = "prompt", text: str = "") -> ResourceVersion:
    resource = PromptTemplate(template=text or f"text of {version}")
    return ResourceVersion(name=name, version=version, resource=resource, parent="v0", algorithm="apo", step=2)


class ResourceTests:
    """What algorithms publish and keep."""

    @store_test
    async def test_newest_version_is_the_default_and_every_version_stays(self, store: Store) -> None:
        await store.publish([_version("v1"), _version("other-1", name="other")])
        await store.publish([_version("v2")])
        assert "v2" == (await store.resource("prompt")).version
        assert _version("v1").resource == (await store.resource("prompt", "v1")).resource
        assert ["v1", "v2"] == [v.version for v in await store.resources("prompt")]
        assert {("other", "other-1"), ("prompt", "v2")} == {(v.name, v.version) for v in await store.resources()}

    @store_test
    async def test_every_kind_of_resource_comes_back_with_its_lineage(self, store: Store) -> None:
        kinds = {
            "llm": LLM(endpoint="http://x/v1", model="m", sampling_parameters={"temperature": 0.5}, api_key_env="KEY"),
            "prompt": PromptTemplate(template="{a}", engine="plain"),
            "weights": Weights(uri="ckpt/1", base_model="b", format="lora"),
            "json": JsonResource(value={"tools": [1, None, "é"]}),
        }
        for name, resource in kinds.items():
            asked = ResourceVersion(
                name=name, version="v1", resource=resource, parent="v0", algorithm="a", step=3, metadata={"score": 0.5}
            )
            await store.publish([asked])
            read = await store.resource(name)
            assert asked == msgspec.structs.replace(read, created_at=asked.created_at)

    @store_test
    async def test_publishing_again_is_harmless_and_other_content_is_refused(self, store: Store) -> None:
        await store.publish([_version("v1"), _version("v2")])
        await store.publish([_version("v1")])
        assert "v2" == (await store.resource("prompt")).version
        with pytest.raises(ConflictError, match="v1"):
            await store.publish([_version("v1", text="other")])
        assert _version("v1").resource == (await store.resource("prompt", "v1")).resource

    @store_test
    async def test_unknown_resources_are_errors_that_name_them(self, store: Store) -> None:
        await store.publish([_version("v1")])
        with pytest.raises(NotFoundError, match="nobody"):
            await store.resource("nobody")
        with pytest.raises(NotFoundError, match="v9"):
            await store.resource("prompt", "v9")

    @store_test
    async def test_key_in_a_resource_is_refused_and_not_kept(self, store: Store) -> None:
        secret = ResourceVersion(name="llm", version="v1", resource=LLM(model="m", api_key="secret-key"))
        with pytest.raises(StoreError, match="api_key") as caught:
            await store.publish([secret])
        assert "secret-key" not in str(caught.value)
        assert [] == await store.resources()

    @store_test
    async def test_publishing_is_a_change(self, store: Store) -> None:
        await store.publish([_version("v1")])
        assert [("resource", "prompt", "v1")] == [(c.kind, c.key, c.status) for c in await store.changes()]

    @store_test
    async def test_states_are_replaced_found_by_prefix_and_deleted_when_empty(self, store: Store) -> None:
        await store.save_state({"exp/b": b"2", "exp/a": b"\x00\xff", "exp_a": b"3", "e%": b"4"})
        await store.save_state({"exp/b": b"22", "e%": b""})
        loaded = await store.load_state("exp/")
        assert [("exp/a", b"\x00\xff"), ("exp/b", b"22")] == list(loaded.items())
        assert {} == await store.load_state("e%")
        assert ["exp_a"] == list(await store.load_state("exp_"))
        assert ["exp/a", "exp/b", "exp_a"] == list(await store.load_state(""))

    @store_test
    async def test_metrics_replace_and_come_in_order(self, store: Store) -> None:
        def metric(step: int, name: str, value: float, experiment: str = "e") -> Metric:
            return Metric(experiment=experiment, algorithm="grpo", step=step, name=name, value=value, time=5.0)

        await store.log_metrics([metric(2, "reward", 0.2), metric(1, "reward", 0.1), metric(1, "loss", 3.0)])
        await store.log_metrics([metric(1, "reward", 0.5), metric(1, "reward", 9.0, "other")])
        assert [
            (1, "loss", 3.0),
            (1, "reward", 0.5),
            (2, "reward", 0.2),
        ] == [(m.step, m.name, m.value) for m in await store.metrics("e")]
        assert [3.0] == [m.value for m in await store.metrics("e", name="loss")]
        assert [] == await store.metrics("nobody")

    @store_test
    async def test_delete_removes_finished_rollouts_with_all_they_have(self, store: Store) -> None:
        first, second = await finish_one(store, spans=2), await finish_one(store, spans=1)
        assert 1 == await store.delete([first.rollout_id])
        assert [second.rollout_id] == [r.rollout_id for r in await store.rollouts(RolloutQuery())]
        with pytest.raises(NotFoundError, match=first.rollout_id):
            await store.spans(first.rollout_id)
        assert 1 == len(await store.spans(second.rollout_id))

    @store_test
    async def test_delete_refuses_what_a_run_still_needs_and_then_removes_nothing(self, store: Store) -> None:
        done = await finish_one(store)
        running = await start_one(store)
        queued = (await store.enqueue([make_rollout()]))[0]
        for unfinished in (running.rollout.rollout_id, queued.rollout_id):
            with pytest.raises(ConflictError, match=unfinished):
                await store.delete([done.rollout_id, unfinished])
        assert 3 == len(await store.rollouts(RolloutQuery()))
