"""Every public name of Agent Lightning 0.3.0: it works under ``agl_lightning``, or says what replaced it."""

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import new_class
from typing import Any

import pytest

import agl_lightning as lightning
from agl.errors import ConfigError
from agl.schemas import Outcome, RetryPolicy, Reward, Rollout, Span
from agl_lightning import APO, LLM, VERL, AttemptedRollout, LitAgent, PromptTemplate, Trainer
from agl_lightning.replaced import remedies
from agl_run import AgentSpec, policy

ROOT = Path(__file__).parents[3]
RECORD = Rollout(rollout_id="r", task={"x": 1}, attempt_id="r.1", attempts=1)
IDS: dict[str, Any] = {"rollout_id": "r", "attempt_id": "r.1", "span_id": "1" * 16}
REWARD = Span(**IDS, name="reward", reward=Reward(value=0.5, dimensions={"goal": 1.0}))
SAID = Span(**IDS, name="message", attributes={"agl.message": "hi", "agl.object": [1]})


class Client:
    """A client like those of ``openai``, with the two attributes that matter here."""

    base_url, api_key = "http://127.0.0.1:1/v1/", None


def named(task: Any, llm: Any = None, prompt_template: Any = None) -> Any:
    return task


def emitted(emit: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """Call an emitter outside of a rollout, where it does nothing."""
    return emit(*args, **settings)


WORKS: dict[str, Callable[[Any], bool]] = {
    "APO": lambda name: name[dict](Client(), beam_rounds=1).config.use == "apo",
    "AgentOpsTracer": lambda name: Trainer(tracer=name()).config.algorithm == (),
    "Attempt": lambda name: name(attempt_id="r.1", rollout_id="r", number=2, worker="").sequence_id == 2,
    "AttemptStatus": lambda name: "failed" in name.__args__,
    "AttemptedRollout": lambda name: name(rollout_id="r", task=1, attempt_id="r.1").attempt.attempt_id == "r.1",
    "AttributeValue": lambda name: name is not None,
    "Attributes": lambda name: dict[str, Any] == name,
    "Baseline": lambda name: Trainer(algorithm=name()).config.algorithm == (),
    "ClientServerExecutionStrategy": lambda name: Trainer(strategy=name(n_runners=3)).n_runners == 3,
    "Dataset": lambda name: name[int] is not None,
    "DevTaskLoader": lambda name: name(tasks=[1], resources={}).tasks == [1],
    "DummyTracer": lambda name: Trainer(tracer=name).config.tracers == Trainer().config.tracers,
    "InMemoryLightningStore": lambda name: Trainer(store=name()).config.experiment.store == "memory://",
    "LLM": lambda name: name(endpoint="http://x/v1", model="m").get_base_url("r", "r.1") == "http://x/v1",
    "LightningStore": lambda name: hasattr(name, "enqueue"),
    "LightningStoreThreaded": lambda name: name(Client) is Client,
    "LitAgent": lambda name: name[dict](trained_agents="write").trained_agents == "write",
    "LitAgentRunner": lambda name: hasattr(name[dict](lightning.OtelTracer()), "run_context"),
    "LlmProxyTraceToTriplet": lambda name: Trainer(adapter=name()).adapter.agent_match is None,
    "NamedResources": lambda name: dict[str, Any] == name,
    "OtelTracer": lambda name: Trainer(tracer=name()).config.algorithm == (),
    "PromptTemplate": lambda name: name(template="{x}", engine="f-string").format(x=1) == "1",
    "ProxyLLM": lambda name: name is LLM,
    "Resource": lambda name: LLM in name.__args__,
    "ResourceUnion": lambda name: PromptTemplate in name.__args__,
    "Rollout": lambda name: name(rollout_id="r", task=1).input == 1,
    "RolloutMode": lambda name: name.__args__ == ("train", "val", "test"),
    "RolloutRawResult": lambda name: name is Any,
    "RolloutStatus": lambda name: "succeeded" in name.__args__,
    "SharedMemoryExecutionStrategy": lambda name: Trainer(strategy=name(n_runners=2)).n_runners == 2,
    "Span": lambda name: name is Span,
    "SpanLike": lambda name: name is Span,
    "TaskInput": lambda name: name is Any,
    "TraceToMessages": lambda name: name().adapt([SAID]) == [],
    "Tracer": lambda name: hasattr(name, "install"),
    "TracerTraceToTriplet": lambda name: name(agent_match="a").adapt([SAID]) == [],
    "Trainer": lambda name: name(n_workers=2, max_tasks=3).n_runners == 2,
    "Triplet": lambda name: name(prompt=1, response=2).reward is None,
    "VERL": lambda name: name({"algorithm": {"adv_estimator": "grpo"}}).config.params["engine"] == "inproc",
    "configure_logger": lambda name: name(name="agl.toy").level == logging.INFO,
    "emit_annotation": lambda name: emitted(name, {"a": 1}) is None,
    "emit_exception": lambda name: emitted(name, ValueError("x"), {"a": 1}) is None,
    "emit_message": lambda name: emitted(name, "x", {"a": 1}) is None,
    "emit_object": lambda name: emitted(name, {"x": 1}, attributes={"a": 1}) is None,
    "emit_reward": lambda name: lightning.get_reward_value(name({"a": 1.0, "b": 0.5}, primary_key="a")) == 1.0,
    "find_final_reward": lambda name: name([SAID, REWARD, SAID]) == 0.5,
    "find_reward_spans": lambda name: name([SAID, REWARD]) == [REWARD],
    "get_message_value": lambda name: [name(REWARD), name(SAID)] == [None, "hi"],
    "get_object_value": lambda name: name(SAID) == [1],
    "get_reward_value": lambda name: name(REWARD) == 0.5,
    "get_rewards_from_span": lambda name: [reward.value for reward in name(REWARD)] == [0.5, 1.0],
    "is_reward_span": lambda name: [name(REWARD), name(SAID)] == [True, False],
    "llm_rollout": lambda name: name(strip_proxy=False)(named)("x") == name(named)("x") == "x",
    "operation": lambda name: name(named)("x") == name(category="c")(named)("x") == "x",
    "prompt_rollout": lambda name: name()(named)("x") == name(named)("x") == "x",
    "reward": lambda name: name(named)(1.0) == 1.0,
    "rollout": lambda name: name(named)("x") == "x",
    "setup_logging": lambda name: name("DEBUG", console=False) is None,
    "setup_module_logging": lambda name: name("DEBUG", name="agl.toy").level == logging.DEBUG,
}
"""The names that work, each with a use of it as in Agent Lightning."""

REPLACED = [
    "Adapter",
    "AgentLightningClient",
    "AgentLightningServer",
    "Algorithm",
    "CollectionBasedLightningStore",
    "EnqueueRolloutRequest",
    "Event",
    "ExecutionEvent",
    "ExecutionStrategy",
    "FastAlgorithm",
    "FilterField",
    "FilterOptions",
    "GenericResponse",
    "Hook",
    "LLMProxy",
    "LegacyAgentRunner",
    "LightningEnvVar",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "Link",
    "MultiprocessingEvent",
    "OtelResource",
    "OtelTraceAdapter",
    "PaginatedResult",
    "ParallelWorkerBase",
    "ResourcesUpdate",
    "RolloutConfig",
    "RolloutLegacy",
    "RolloutRawResultLegacy",
    "Runner",
    "SortOptions",
    "SpanAttributeNames",
    "SpanContext",
    "SpanCoreFields",
    "SpanNames",
    "SpanRecordingContext",
    "StatusCode",
    "Task",
    "TaskIfAny",
    "ThreadingEvent",
    "TraceAdapter",
    "TraceState",
    "TraceStatus",
    "TraceToTripletBase",
    "TraceTree",
    "Worker",
    "WorkerStatus",
    "algo",
    "build_component",
    "clear_active_tracer",
    "get_active_tracer",
    "lightning_cli",
    "resolve_bool_env_var",
    "resolve_int_env_var",
    "resolve_str_env_var",
    "set_active_tracer",
]
"""The other names of 0.3.0, those of its top module and ``TraceTree``."""


@pytest.fixture(autouse=True)
def loggers() -> Any:
    """Restore the loggers that a test sets up."""
    kept = {name: logging.getLogger(name) for name in ("agl", "agl_run", "agl.toy", "mine")}
    before = {name: (log.level, log.propagate, log.handlers[:]) for name, log in kept.items()}
    yield
    for name, log in kept.items():
        for handler in [handler for handler in log.handlers if handler not in before[name][2]]:
            handler.close()
        log.level, log.propagate, log.handlers[:] = before[name]


@pytest.mark.parametrize("name", WORKS)
def test_name_of_agent_lightning_works(name: str) -> None:
    assert WORKS[name](getattr(lightning, name))


@pytest.mark.parametrize("name", REPLACED)
def test_name_of_agent_lightning_says_what_replaced_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^Agent Lightning's {name} has no counterpart of its form here; ") as raised:
        getattr(lightning, name)()
    page = re.search(r"\(see (docs/\S+\.md)\)$", str(raised.value))
    assert page is not None
    assert (ROOT / page[1]).is_file()


USES: dict[str, Callable[[Any], Any]] = {
    "call": lambda name: name(port=1),
    "subclass": lambda name: new_class("Own", (name,)),
    "attribute": lambda name: name.ADDRESS,
    "type argument": lambda name: name[int],
    "members": list,
}


@pytest.mark.parametrize("use", USES)
def test_replaced_name_can_be_imported_and_is_refused_when_it_is_used(use: str) -> None:
    from agl_lightning import Hook, make_tag_attributes  # pyright: ignore[reportAttributeAccessIssue]  # by __getattr__

    def annotated(hook: Hook | None = None) -> Any:  # pyright: ignore[reportInvalidTypeForm]
        return hook

    assert annotated() is None
    for name in (Hook, make_tag_attributes):
        with pytest.raises(ConfigError, match="has no counterpart of its form here"):
            USES[use](name)


def test_hooks_that_messages_and_the_page_name_exist() -> None:
    with pytest.raises(ConfigError) as refused:
        Trainer(hooks=[1])
    page = (ROOT / "docs/how-to/agent-lightning.md").read_text(encoding="utf-8")
    text = f"{refused.value} {remedies()} {page.partition('## Names that were replaced')[2]}"
    named = set(re.findall(r"\bagl_(?!run\b)\w+", text))
    reference = (ROOT / "docs/reference/hooks.md").read_text(encoding="utf-8")
    assert {"agl_exporters"} == {name for name in named if f"### `{name}(" in reference} == named


def test_names_that_work_are_listed() -> None:
    assert set(WORKS) <= set(dir(lightning))


def test_name_that_agent_lightning_has_not_is_an_attribute_error() -> None:
    assert not hasattr(lightning, "Lightning")


def test_importing_the_names_imports_no_trainer() -> None:
    code = "import sys, agl_lightning; print('agl_run.run.trainer' in sys.modules)"
    assert "False\n" == subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "hooks": (lambda: Trainer(hooks=[1]), "take finished rollouts by an exporter of a plugin"),
    "proxy": (lambda: Trainer(llm_proxy=1), "every trainer starts its own gateway"),
    "port": (lambda: Trainer(port=9999), "find each other in the store"),
    "daemon": (lambda: Trainer(daemon=False), "leave daemon= out"),
    "tracer": (lambda: Trainer(tracer=Client()), r"name tracers of this project with tracers=\['langchain'\]"),
    "strategy": (lambda: Trainer(strategy="ray"), "write runner='process'"),
    "adapter": (lambda: Trainer(adapter=Client()), "write adapter={'agent_match'"),
    "adapter key": (lambda: Trainer(adapter={"agents": "x"}), r"the adapter got \['agents'\]; it takes agent_match"),
    "argument": (lambda: Trainer(n_runner=2), "did you mean 'n_runners'"),
    "max_tasks": (lambda: Trainer(max_tasks=2).fit(named, [1]), "max_rollouts=2, which limits dev"),
    "no task": (lambda: Trainer().dev(named), "dev.. got no task"),
    "key": (lambda: Trainer(initial_resources={"m": LLM(endpoint="http://x/v1", api_key="s")}), "api_key_env='MY_KEY'"),
    "client": (lambda: APO(object()), "needs a client of openai with a base_url"),
    "timeout": (lambda: APO(Client(), rollout_batch_timeout=9.0), "set the time of one attempt"),
    "unmeasured": (lambda: APO(Client(), run_initial_validation=False), "the first prompt is always measured"),
    "best prompt": (lambda: APO(Client()).get_best_prompt(), "call trainer.fit"),
    "class of VERL": (lambda: VERL({}, trainer_cls=int), r"VERL got \['trainer_cls'\]"),
    "model of VERL": (lambda: Trainer(algorithm=VERL({})), "set actor_rollout_ref.model.path"),
    "address": (lambda: Trainer(strategy={"type": "cs", "server_port": 99}), r"got \{'server_port': 99\}"),
    "side": (lambda: lightning.ClientServerExecutionStrategy("runner"), "`agl worker` on the other machines"),
    "runner hooks": (
        lambda: lightning.LitAgentRunner().run_context(agent=named, store=Client, hooks=[1]).__enter__(),  # pyright: ignore[reportArgumentType]
        "read the recording after the step",
    ),
    "attributes": (lambda: lightning.emit_reward(1.0, attributes={"a": 1}), "which a reward here does not carry"),
    "parameter": (lambda: lightning.llm_rollout(lambda task: task), "and this decorator fills 'llm'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_argument_without_a_counterpart_is_refused_with_what_to_write(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_trainer_takes_the_arguments_of_both_projects() -> None:
    config = Trainer(
        n_runners=2, strategy={"type": "shm", "n_runners": 4}, adapter={"agent_match": None}, name="mine", seed=3
    ).config
    assert (2, "mine", 3) == (config.runner.concurrency, config.experiment.name, config.experiment.seed)
    assert 4 == Trainer(strategy={"type": "cs", "n_runners": 4}).n_runners


def test_role_that_the_environment_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CURRENT_ROLE", "runner")
    with pytest.raises(ConfigError, match=r"'AGL_CURRENT_ROLE': 'runner'.*`agl worker` on the other machines"):
        Trainer()


def test_classes_of_agent_lightning_are_found_by_their_paths() -> None:
    trainer = Trainer(algorithm="agentlightning.algorithm.Baseline", tracer="agentlightning.tracer.OtelTracer")
    assert isinstance(trainer.algorithm, lightning.Baseline)


@lightning.rollout
def marked(task: Any, prompt_template: PromptTemplate) -> float:
    return float(prompt_template.format(x=task))


def test_marked_function_has_the_methods_of_an_agent() -> None:
    resources = {"main_prompt": PromptTemplate(template="{x}", engine="f-string")}
    assert not marked.is_async()
    assert 2.0 == marked.rollout(2, resources, RECORD)
    assert ("task", "prompt_template") == AgentSpec.of(marked).load().parameters


def test_reward_of_the_last_triplet_is_the_rollouts() -> None:
    def answer(task: Any) -> Any:
        return [lightning.Triplet(prompt={}, response={}, reward=value) for value in (0.25, 0.75, None)]

    result = Trainer(store=lightning.InMemoryLightningStore()).dev(lightning.rollout(answer), [1])
    assert [0.75] == [episode.reward for episode in result.episodes]


async def test_store_queues_rollouts_publishes_resources_and_is_queried() -> None:
    store = lightning.InMemoryLightningStore()
    (version,) = await store.add_resources({"p": PromptTemplate(template="x", engine="plain")})
    queued = [await store.enqueue_rollout(input=number, metadata={"n": number}) for number in range(3)]
    assert queued == await store.query_rollouts()
    assert queued[1] == await store.get_rollout_by_id(queued[1].rollout_id)
    assert [] == await store.query_rollouts(status_in=["failed"])
    assert await store.get_rollout_by_id("ro-none") is None
    assert version.version == (await store.resource("p")).version


@pytest.mark.parametrize("is_dev", [True, False])
def test_tasks_of_a_generator_run_all(is_dev: bool) -> None:
    trainer = Trainer(store=lightning.InMemoryLightningStore(), algorithm=lightning.Baseline(n_epochs=2), dev=is_dev)
    result = trainer.fit(lightning.rollout(named), (number for number in (1, 2)), val_dataset=iter([3]))
    assert [1, 2, 3] * 2 == [episode.rollout.task for episode in result.episodes]  # pyright: ignore[reportAttributeAccessIssue]  # of dev


def test_keys_stay_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret-1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-2")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://x/v1/")
    resources = {
        "given": LLM(endpoint="http://y/v1", model="m", api_key="secret-1"),
        "own": LLM(endpoint="http://x/v1", model="m"),
        "other": LLM(endpoint="http://y/v1", model="m"),
    }

    policies = Trainer(initial_resources=resources).config.policy

    assert {"given": "SOME_KEY", "own": "OPENAI_API_KEY", "other": ""} == {
        name: found.params["api_key_env"] for name, found in policies.items()
    }
    assert (
        "SOME_KEY"
        == APO(type("C", (), {"base_url": "http://y", "api_key": "secret-1"})()).config.params["critic"]["api_key_env"]
    )


def test_apo_asks_the_models_that_it_names_at_the_address_of_its_client() -> None:
    params: Any = APO[dict](
        Client(), gradient_model="a", apply_edit_model="b", beam_width=2, branch_factor=3
    ).config.params

    assert ("http://127.0.0.1:1/v1", "b", "a") == (
        params["optimizer"]["base_url"],
        params["optimizer"]["model"],
        params["critic"]["model"],
    )
    assert (6, "medium", "beam") == (params["beam_rounds"], params["budget"], params["parents"]["selector"])


@pytest.mark.parametrize(("name", "engine", "use"), [("vllm", "ray", "verl"), ("hf", "inproc", "torch")])
def test_verl_serves_the_model_of_its_configuration(name: str, engine: str, use: str) -> None:
    config = {
        "actor_rollout_ref": {"model": {"path": "tiny"}, "rollout": {"name": name}},
        "trainer": {"test_freq": 32},
        "agentlightning": {"trace_aggregator": {"level": "trajectory"}},
    }

    made = Trainer(algorithm=VERL(config), initial_resources={"main_llm": LLM(endpoint="http://x/v1")}).config

    assert {"main_llm": policy(use, model="tiny")} == made.policy
    assert {"actor_rollout_ref", "trainer", "engine"} == set(made.algorithm[0].params)
    assert (engine, 32) == (made.algorithm[0].params["engine"], made.experiment.validate_every)


class Forms(LitAgent[Any]):
    """Reports the record that each form gets."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
        return "val", rollout

    async def training_rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
        return "train", rollout


@pytest.mark.parametrize("mode", ["train", "val"])
def test_async_forms_get_a_rollout_with_its_attempt(mode: Any) -> None:
    from msgspec.structs import replace

    found, record = asyncio.run(AgentSpec.of(Forms()).load().call(replace(RECORD, mode=mode), {}))

    assert mode == found
    assert isinstance(record, AttemptedRollout)
    assert ("r.1", {"x": 1}) == (record.attempt.attempt_id, record.input)


def test_spans_of_every_attempt_are_found() -> None:
    async def main() -> list[list[str]]:
        store = lightning.InMemoryLightningStore()
        await store.enqueue([Rollout(rollout_id="r", task=1, retry=RetryPolicy(max_attempts=2))])
        for number in (1, 2):
            (claim,) = await store.claim(worker="w")
            made = Span(**{**IDS, "attempt_id": claim.attempt.attempt_id}, name=f"try {number}")
            status = "failed" if number == 1 else "succeeded"
            await store.finish([Outcome(attempt_id=claim.attempt.attempt_id, status=status, spans=(made,))])
        ids = [attempt.attempt_id for attempt in await store.query_attempts("r")]
        return [[span.name for span in await store.query_spans("r", each)] for each in (None, *ids, "latest")]

    assert [["try 1", "try 2"], ["try 1"], ["try 2"], ["try 2"]] == asyncio.run(main())


@pytest.mark.parametrize("is_recorded", [True, False])
def test_operation_takes_arguments_of_every_name(is_recorded: bool) -> None:
    @lightning.operation(propagate=is_recorded)
    def add(first: int, /, *, args: int, output: int) -> int:
        return first + args + output

    assert 6 == add(1, args=2, output=3)


def test_address_with_the_attempts_path_is_not_extended_again() -> None:
    llm = LLM(endpoint="http://x/v1", api_key="t")
    routed = LLM(endpoint=llm.get_base_url("r", "r.1"), api_key="t")
    assert "http://x/rollout/r/attempt/r.1/key/t/v1" == routed.endpoint == routed.get_base_url("r", "r.1")


def test_logging_that_is_set_up_again_writes_each_line_once(tmp_path: Path) -> None:
    for _ in range(2):
        lightning.setup_logging(console=False, files={"apart.part": str(tmp_path / "part.log")})
    logger = logging.getLogger("apart.part")
    try:
        logger.warning("once")
        assert 1 == (tmp_path / "part.log").read_text().count("once")
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers.clear()


def test_logging_is_set_up_for_the_loggers_that_are_named(tmp_path: Path) -> None:
    lightning.setup_logging(
        "WARNING",
        color=False,
        apply_to=["mine"],
        files=str(tmp_path / "all.log"),
        submodule_levels={"agl.toy": "DEBUG"},
    )

    logging.getLogger("mine").warning("one")
    logging.getLogger("mine").info("two")
    logging.getLogger("agl_lightning").error("three")

    assert ["one", "three"] == [line.split()[-1] for line in (tmp_path / "all.log").read_text().splitlines()]
    assert logging.DEBUG == logging.getLogger("agl.toy").level
