"""CrewAI: what the tracer adds to a model call. No figures where it is not installed.

A crew spends several milliseconds of its own on every task, more than the tracer could be told apart in. So the
events that one task with one model call emits are put on CrewAI's bus without the crew: the same objects, the same
handlers, nothing else.
"""

import gc
import os
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from typing import Any

from benchmarks._adapters import overhead
from benchmarks._harness import Figure, component, table

_CALLS = 200
_FOUND = all(map(find_spec, ("crewai", "agl_crewai")))


def figures(*, repeats: int) -> list[Figure]:
    """The events of a crew with many tasks, each done by one agent with one model call."""
    tracer = component("tracer", "crewai")
    os.environ.update(tracer.worker_env())  # before the import, and for both cases: no telemetry, no uploads
    from crewai import Agent, BaseLLM, Crew, Task
    from crewai.events import crewai_event_bus
    from crewai.events.types.agent_events import AgentExecutionCompletedEvent, AgentExecutionStartedEvent
    from crewai.events.types.crew_events import CrewKickoffCompletedEvent, CrewKickoffStartedEvent
    from crewai.events.types.llm_events import LLMCallType
    from crewai.events.types.task_events import TaskCompletedEvent, TaskStartedEvent
    from crewai.llms.base_llm import llm_call_context
    from crewai.tasks.task_output import TaskOutput

    class Ready(BaseLLM):
        def call(self, messages: Any, *args: Any, **whose: Any) -> str:
            with llm_call_context():
                self._emit_call_started_event(messages, **whose)
                self._emit_call_completed_event("done", LLMCallType.LLM_CALL, messages=messages, **whose)
            return "done"

    text = "x " * 500
    model = Ready(model="ready")
    agent = Agent(role="writer", goal="be a writer", backstory="none", llm=model)
    task = Task(description=text, expected_output="text", agent=agent)
    crew = Crew(name="office", agents=[agent], tasks=[task])
    done = TaskOutput(description=text, agent="writer", raw="done")
    emit = crewai_event_bus.emit
    gc.collect()
    gc.freeze()  # CrewAI's modules hold so much that a collection falls onto some samples and doubles them

    def one_task() -> None:
        emit(task, TaskStartedEvent(context="", task=task))
        emit(agent, AgentExecutionStartedEvent(agent=agent, task=task, tools=[], task_prompt=text))
        model.call([{"role": "user", "content": text}], from_task=task, from_agent=agent)
        emit(agent, AgentExecutionCompletedEvent(agent=agent, task=task, output="done"))
        emit(task, TaskCompletedEvent(output=done, task=task))

    def office() -> None:
        emit(crew, CrewKickoffStartedEvent(crew_name="office", crew=crew, inputs=None))
        for _ in range(_CALLS):
            one_task()
        emit(crew, CrewKickoffCompletedEvent(crew_name="office", crew=crew, output=done))
        crewai_event_bus.flush()

    def calls() -> int:
        with redirect_stdout(StringIO()):  # a crew's end prints how to turn CrewAI's own tracing on
            office()
        return _CALLS

    return [overhead("CrewAI tracer per call, with its task and agent", tracer, calls, repeats=repeats)]


def run(*, quick: bool) -> list[Figure]:
    """The figures, or none."""
    return figures(repeats=3 if quick else 9) if _FOUND else []


if __name__ == "__main__":
    print(table(run(quick=False)))
