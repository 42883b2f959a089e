"""``agl resources variant``: gives one user or one agent a version of its own."""

import click

from agl.contracts import Store
from agl.errors import ConfigError, NotFoundError
from agl_inspect.versions import shown
from agl_inspect.records.splits import VARIANTS, Variant
from agl_inspect.terminal.opening import Reading, reads_store
from agl_inspect.terminal.output import print_table


@click.command("variant")
@click.argument("name", required=False)
@click.argument("version", required=False)
@click.option("--user", default="", help="The user who gets the version.")
@click.option("--agent", default="", help="The agent that gets the version.")
@click.option("--remove", is_flag=True, help="Give the user or the agent the shared version again.")
@reads_store
def variant(
    store: Reading, name: str | None, version: str | None, user: str, agent: str, remove: bool
) -> None:
    """Give one user or one agent a VERSION of NAME of its own, or list all such variants.

    VERSION is a version or a label. It is served from the next conversation on, by gateways that serve a split, such
    as that of agl learn. Everybody else, and every other resource, keeps the shared version. A user's variant comes
    before an agent's. Conversations with a variant count in no comparison of versions.
    """
    if name is None:
        found = store.read(VARIANTS.read)
        rows = [(who, each, own) for who, one in found.items() for each, own in one.versions.items()]
        store.show(found, lambda: ()) if store.as_json else print_table(("for", "name", "version"), rows)
        return
    if bool(user) == bool(agent) or (version is None) != remove:
        raise ConfigError(
            f"write agl resources variant {name} VERSION --user USER, with --agent AGENT instead of --user for an "
            "agent, and with --remove instead of VERSION to take it back"
        )
    whose = f"user:{user}" if user else f"agent:{agent}"

    async def work(opened: Store) -> Variant:
        known = await VARIANTS.get(opened, whose) or Variant(versions={})
        if remove and name not in known.versions:
            raise NotFoundError("variant", f"{name} for {whose}", "agl resources variant lists the variants")
        others = {each: own for each, own in known.versions.items() if each != name}
        own = {} if version is None else {name: (await shown(opened, name, version)).version.version}
        changed = Variant(versions={**others, **own})
        states = VARIANTS.states({whose: changed})
        await opened.save_state(states if changed.versions else dict.fromkeys(states, b""))
        return changed

    made = store.read(work)
    store.show(made, lambda: [f"{name} for {whose}: {made.versions.get(name, 'the shared version')}"])
