"""Tests of resource versions with their labels and scores, of metrics and of retention."""

# ruff: noqa: D102  # the names of the tests say what holds

import asyncio
from typing import Any

import msgspec
import pytest

from agl.contracts import LabelMove, Metric, RolloutQuery, Store, VersionScore
from agl.errors import ConflictError, NotFoundError, StoreError
from agl.schemas import LLM, JsonResource, PromptTemplate, ResourceVersion, Weights
from agl_testing.conformance.store.case import store_test
from agl_testing.stores.samples import finish_one, make_rollout, start_one


def _version(version: str, *, name: str = "prompt", text: str = "") -> ResourceVersion:
    resource = PromptTemplate(template=text or f"text of {version}")
    return ResourceVersion(name=name, version=version, resource=resource, parent="v0", algorithm="apo", step=2)


class ResourceTests:
    """Tests of the records that algorithms write: versions, labels, scores and metrics."""

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
    async def test_label_points_where_it_was_moved_last_and_every_move_is_kept(self, store: Store) -> None:
        await store.publish([_version("v1"), _version("v2")])
        asked = [
            LabelMove(name="prompt", label="production", version="v1", reason="first"),
            LabelMove(name="prompt", label="production", version="v2"),
            LabelMove(name="prompt", label="production", version="v1", is_back=True, reason="back from v2"),
        ]
        made = [await store.move_label(move) for move in asked]
        assert asked == [msgspec.structs.replace(move, moved_at=0.0) for move in made]
        assert made == await store.label_moves("prompt", "production")
        assert 0 < made[0].moved_at < made[1].moved_at < made[2].moved_at
        assert [made[-1]] == await store.labels("prompt")
        assert [] == await store.label_moves("prompt", "other")

    @store_test
    async def test_every_move_is_kept_however_fast_they_follow_each_other(self, store: Store) -> None:
        await store.publish([_version(version) for version in ("v0", "v1")])
        moves = [LabelMove(name="prompt", label="production", version=f"v{at % 2}") for at in range(200)]
        made = await asyncio.gather(*(store.move_label(move) for move in moves))
        history = await store.label_moves("prompt", "production")
        assert sorted({move.moved_at for move in made}) == [move.moved_at for move in history]

    @store_test
    async def test_label_that_points_there_already_does_not_move(self, store: Store) -> None:
        await store.publish([_version("v1")])
        first = await store.move_label(LabelMove(name="prompt", label="production", version="v1", reason="first"))
        again = await store.move_label(LabelMove(name="prompt", label="production", version="v1", reason="again"))
        assert [first] == [again] == await store.label_moves("prompt", "production")

    @store_test
    async def test_labels_belong_to_their_resource(self, store: Store) -> None:
        names = ["a", "a.b", "é"]
        await store.publish([_version("v1", name=name) for name in names])
        for name in reversed(names):
            for label in ("production", "candidate"):
                await store.move_label(LabelMove(name=name, label=label, version="v1"))
        expected = [(name, label) for name in names for label in ("candidate", "production")]
        assert expected == [(move.name, move.label) for move in await store.labels()]
        assert expected[:2] == [(move.name, move.label) for move in await store.labels("a")]
        assert [] == await store.labels("b")

    @store_test
    async def test_label_of_an_unknown_version_is_refused(self, store: Store) -> None:
        await store.publish([_version("v1")])
        for name, version in (("prompt", "v9"), ("nobody", "v1")):
            with pytest.raises(NotFoundError, match=f"{name}@{version}"):
                await store.move_label(LabelMove(name=name, label="production", version=version))
        assert [] == await store.labels()

    @store_test
    async def test_scores_replace_those_of_the_same_version(self, store: Store) -> None:
        def score(version: str, mean: float, name: str = "prompt") -> VersionScore:
            low, high = mean - 0.125, mean + 0.125
            return VersionScore(name=name, version=version, mean=mean, low=low, high=high, n=8, how="fresh")

        await store.publish([_version("v1"), _version("v2"), _version("v1", name="prompt.x")])
        await store.save_scores([score("v2", 0.5), score("v1", 0.25), score("v1", 1.0, "prompt.x")])
        await store.save_scores([score("v2", 0.75)])
        assert [score("v1", 0.25), score("v2", 0.75)] == await store.scores("prompt")
        assert [] == await store.scores("nobody")
        with pytest.raises(NotFoundError, match="v9"):
            await store.save_scores([score("v1", 0.0), score("v9", 0.0)])
        assert [0.25, 0.75] == [each.mean for each in await store.scores("prompt")]

    @store_test
    async def test_metrics_replace_and_come_in_order(self, store: Store) -> None:
        def metric(step: int, name: str, value: float, experiment: str = "e") -> Metric:
            return Metric(experiment=experiment, algorithm="grpo", step=step, name=name, value=value, time=5.0)

        await store.log_metrics([metric(2, "reward", 0.2), metric(1, "reward", 0.1), metric(1, "loss", 3.0)])
        await store.log_metrics([metric(1, "reward", 0.5), metric(1, "reward", 9.0, "other")])
        assert [(1, "loss", 3.0), (1, "reward", 0.5), (2, "reward", 0.2)] == [
            (m.step, m.name, m.value) for m in await store.metrics("e")
        ]
        assert [3.0] == [m.value for m in await store.metrics("e", name="loss")]
        assert [] == await store.metrics("nobody")

    @store_test
    async def test_metrics_of_each_run_are_kept_apart(self, store: Store) -> None:
        def metric(run: int, step: int, name: str, experiment_step: int | None = None) -> Metric:
            common: dict[str, Any] = {"experiment": "e", "algorithm": "grpo", "value": 0.5, "time": 5.0}
            return Metric(run=run, step=step, name=name, experiment_step=experiment_step, **common)

        first = [metric(1, 1, "loss"), metric(1, 1, "reward", 2), metric(1, 2, "reward", 4)]
        second = [metric(2, 1, "reward", 3)]
        await store.log_metrics([*second, *first, metric(10, 1, "loss")])
        await store.log_metrics(second)
        assert [*first, *second, metric(10, 1, "loss")] == await store.metrics("e")
        assert first == await store.metrics("e", run=1)
        assert [*first[1:], *second] == await store.metrics("e", name="reward")
        assert second == await store.metrics("e", name="reward", run=2)
        assert [] == await store.metrics("e", run=3)

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
