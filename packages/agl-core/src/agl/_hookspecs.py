"""The hooks of plugins. Provider hooks return records; observer hooks only watch, and their errors stop nothing.

Hooks are synchronous. Provider hooks do no work: the components that they name are built on request.
Write ``from agl import hookimpl`` and define functions with these names in the module that the ``agl`` entry point
names. That module imports ``agl`` and the standard library only.
"""

from collections.abc import Iterable
from pathlib import Path

import pluggy

from agl._entries import (
    AlgorithmEntry,
    CommandEntry,
    CreditEntry,
    ExporterEntry,
    GatewayEntry,
    ModalityEntry,
    PolicyEntry,
    RedactorEntry,
    RewardEntry,
    RunnerEntry,
    StoreEntry,
    TracerEntry,
)
from agl.contracts import StepReport

# One word for all four uses, so that a plugin's author has one name to remember.
PROJECT = "agl"
"""Name of the pluggy project, of its hook marker, and of the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of the hook that has its name."""


class AglSpec:
    """Every hook that a plugin may implement."""

    @hookspec
    def agl_tracers(self) -> Iterable[TracerEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Tracers, one per framework; called when plugins load.

        .. code-block:: python

            @agl.hookimpl
            def agl_tracers():
                yield agl.TracerEntry(name="echo", factory="agl_echo.tracer:EchoTracer", frameworks=("echo",))
        """

    @hookspec
    def agl_rewards(self) -> Iterable[RewardEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Reward emitters, named in ``[[reward]] use = "..."``.

        .. code-block:: python

            @agl.hookimpl
            def agl_rewards():
                yield agl.RewardEntry(name="contains", factory="agl_toy:Contains", summary="substring match")
        """

    @hookspec
    def agl_stores(self) -> Iterable[StoreEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Stores by URL scheme.

        .. code-block:: python

            @agl.hookimpl
            def agl_stores():
                yield agl.StoreEntry(name="mongo", factory="agl_store_mongo.store:MongoStore")
        """

    @hookspec
    def agl_algorithms(self) -> Iterable[AlgorithmEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Algorithms, named in ``[[algorithm]] use = "..."``.

        .. code-block:: python

            @agl.hookimpl
            def agl_algorithms():
                yield agl.AlgorithmEntry(name="grpo", factory="agl_algo_torch.grpo:GRPO", tunes=("weights",))
        """

    @hookspec
    def agl_credits(self) -> Iterable[CreditEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Credit assignments, named in ``[credit] use = "..."``.

        .. code-block:: python

            @agl.hookimpl
            def agl_credits():
                yield agl.CreditEntry(name="last-call", factory="agl_toy.credit:LastCall")
        """

    @hookspec
    def agl_runners(self) -> Iterable[RunnerEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Runners, named in ``[runner] use = "..."``.

        .. code-block:: python

            from agl.contracts import RunnerEntry


            @agl.hookimpl
            def agl_runners():
                yield RunnerEntry(name="docker", factory="agl_docker.runner:DockerRunner")
        """

    @hookspec
    def agl_policies(self) -> Iterable[PolicyEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Model servers, named in ``[policy.NAME] use = "..."``.

        .. code-block:: python

            @agl.hookimpl
            def agl_policies():
                yield agl.PolicyEntry(name="torch", factory="agl_algo_torch.serving.policy:TorchPolicy", trains=True)
        """

    @hookspec
    def agl_modalities(self) -> Iterable[ModalityEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Modalities, which turn pictures into tokens and tensors; their name is a type of models.

        .. code-block:: python

            from agl.contracts import ModalityEntry


            @agl.hookimpl
            def agl_modalities():
                yield ModalityEntry(name="transformers", factory="agl_vision.modality:TransformersVision")
        """

    @hookspec
    def agl_gateways(self) -> Iterable[GatewayEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Capture proxies; an experiment uses the one named in ``[gateway] use``, by default ``gateway``.

        .. code-block:: python

            from agl.contracts import GatewayEntry


            @agl.hookimpl
            def agl_gateways():
                yield GatewayEntry(name="gateway", factory="agl_gateway.embedded:EmbeddedGateway")
        """

    @hookspec
    def agl_redactors(self) -> Iterable[RedactorEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Redactors, which remove personal data from texts before a gateway stores them; named by ``--redact``.

        .. code-block:: python

            from agl.contracts import RedactorEntry


            @agl.hookimpl
            def agl_redactors():
                yield RedactorEntry(name="patterns", factory="agl_gateway.record.redaction:Patterns")
        """

    @hookspec
    def agl_exporters(self) -> Iterable[ExporterEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Destinations of finished rollouts, or of a run's numbers, named in ``[[exporter]] use = "..."``.

        .. code-block:: python

            from agl.contracts import ExporterEntry


            @agl.hookimpl
            def agl_exporters():
                yield ExporterEntry(name="otlp", factory="agl_sinks.otlp.exporter:OtlpExporter")
        """

    @hookspec
    def agl_commands(self) -> Iterable[CommandEntry]:  # pyright: ignore[reportReturnType]  # specification only
        """Commands below ``agl``; imported only when called.

        .. code-block:: python

            @agl.hookimpl
            def agl_commands():
                yield agl.CommandEntry(name="serve", factory="agl_gateway.cli.serve:serve", summary="run the gateway")
        """

    @hookspec
    def agl_step_finished(
        self, experiment: str, run: int, algorithm: str, report: StepReport, experiment_step: int, workdir: Path
    ) -> None:
        """Called when a step of an algorithm is saved, or when the experiment was validated.

        Called in the process that runs the experiment, once for every step, in the order in which steps finish.
        ``run`` counts the experiment's fresh starts, from 1. ``experiment_step`` counts the steps of all algorithms
        together, including this one. A validation has the algorithm name ``validate``: its ``report.step`` is the
        number of steps that all algorithms took before it, and its metrics are ``reward`` and ``failed``. ``workdir``
        is the experiment's work directory.

        .. code-block:: python

            @agl.hookimpl
            def agl_step_finished(experiment, algorithm, report):
                print(experiment, algorithm, report.step, report.metrics)
        """

    @hookspec
    def agl_alert_raised(
        self, experiment: str, run: int, kind: str, rule: str, algorithm: str, step: int, evidence: str, change: str
    ) -> None:
        """Called when a run has raised an alert: a finding about itself that needs a person.

        Called in the process that runs the experiment, after the finding is stored; once for each finding, even if the
        run is restarted. ``kind`` is ``suggestion``, or ``collapse`` if the run reacted to a fall of the validation
        reward. ``rule`` is the name of the rule, such as ``silent-groups``, which examined ``algorithm`` at ``step``.
        ``evidence`` has the rule's numbers. ``change`` is the recommended change, ``""`` if there is none.

        .. code-block:: python

            @agl.hookimpl
            def agl_alert_raised(experiment, rule, evidence, change):
                print(f"{experiment}: {rule}: {evidence}. {change}")
        """
