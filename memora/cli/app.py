"""The commands, their options and their help.

Owns the parsing. The module of a command, and with it everything heavy, is imported when the command is called.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from memora import __version__
from memora.cli.exit import Exit, close_broken_pipe, flush_output
from memora.cli.streams import argument_text, harmless, is_terminal, use_utf8
from memora.cli.texts import texts_for

_TEXTS: Final = texts_for()

MOST_YOUNG_OBJECTS: Final = 50_000
"""More than two hundred turns have at a time. Turns leave no cycles behind; by the default of 700, a busy server spends
a twelfth of its time, a tenth of a second in one go, on walking over objects that all live."""

app = typer.Typer(
    help=_TEXTS.about,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

IdArgument = Annotated[str, typer.Argument(metavar="ID", help=_TEXTS.conversation_argument, show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help=_TEXTS.json_option)]
OfflineOption = Annotated[bool, typer.Option("--offline", help=_TEXTS.offline_option)]
HostOption = Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help=_TEXTS.host_option)]
PortOption = Annotated[int | None, typer.Option("--port", min=0, max=65_535, help=_TEXTS.port_option)]


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit code; never raises for what a user or the world does wrong."""
    use_utf8()
    return flush_output(_parse_and_run(list(map(argument_text, arguments))))


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parse_and_run(arguments: list[str]) -> int:
    try:
        return int(app(arguments, prog_name="memora", standalone_mode=False) or Exit.DONE)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "memora"
        problem = harmless(" ".join(error.format_message().split())).rstrip(".")
        sys.stderr.write(f"memora: {problem}: see `{command} --help`\n")
        return Exit.WRONG_USE
    except BrokenPipeError:
        return close_broken_pipe()
    except (KeyboardInterrupt, typer.Abort):
        return Exit.INTERRUPTED


@app.callback(invoke_without_command=True)
def memora(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help=_TEXTS.version_help)] = False
) -> None:
    """Show the version or, without a command, the help."""
    if version:
        sys.stdout.write(f"memora {__version__}\n")
        raise typer.Exit(Exit.DONE)
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@app.command(help=_TEXTS.chat_help)
def chat(
    conversation: Annotated[
        str | None, typer.Option("-c", "--conversation", metavar="ID", help=_TEXTS.conversation_option)
    ] = None,
    message: Annotated[str | None, typer.Option("-m", "--message", metavar="TEXT", help=_TEXTS.message_option)] = None,
    as_json: JsonOption = False,
    offline: OfflineOption = False,
) -> None:
    """Talk."""
    if message is None and not as_json and is_terminal(sys.stdin) and is_terminal(sys.stdout):
        # Loading takes a second or two, and nobody waits in silence.
        sys.stdout.write(f"Memora {__version__}\n")
        sys.stdout.flush()
    _call("chat", conversation=conversation, message=message, as_json=as_json, offline=offline)


@app.command(help=_TEXTS.worker_help)
def worker(offline: OfflineOption = False) -> None:
    """Fold until stopped."""
    _call("worker", offline=offline)


@app.command(help=_TEXTS.serve_help)
def serve(host: HostOption = None, port: PortOption = None, offline: OfflineOption = False) -> None:
    """Serve until stopped."""
    _call("serve", host=host, port=port, offline=offline)


@app.command(help=_TEXTS.up_help)
def up(host: HostOption = None, port: PortOption = None, offline: OfflineOption = False) -> None:
    """Run everything until stopped."""
    _call("up", host=host, port=port, offline=offline)


@app.command(help=_TEXTS.inspect_help)
def inspect(
    conversation: Annotated[
        str | None, typer.Argument(metavar="[ID]", help=_TEXTS.conversation_argument, show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is stored."""
    _call("inspect", conversation=conversation, as_json=as_json)


@app.command(help=_TEXTS.audit_help)
def audit(
    conversation: Annotated[
        str | None, typer.Argument(metavar="[ID]", help=_TEXTS.conversation_argument, show_default=False)
    ] = None,
    as_json: JsonOption = False,
    repair: Annotated[bool, typer.Option("--repair", help=_TEXTS.repair_option)] = False,
) -> None:
    """Check what is stored."""
    _call("audit", conversation=conversation, as_json=as_json, repair=repair)


@app.command(help=_TEXTS.loadtest_help)
def loadtest(  # noqa: PLR0917  # typer makes an option of each
    context: typer.Context,
    rate: Annotated[float | None, typer.Option(min=0.01, max=10_000, help=_TEXTS.rate_option)] = None,
    conversations: Annotated[int | None, typer.Option(min=1, max=100_000, help=_TEXTS.conversations_option)] = None,
    think_seconds: Annotated[float | None, typer.Option(min=0.01, max=86_400, help=_TEXTS.think_option)] = None,
    duration: Annotated[float, typer.Option(min=1, max=86_400, help=_TEXTS.duration_option)] = 60.0,
    message_words: Annotated[int, typer.Option(min=1, max=1_000, help=_TEXTS.message_words_option)] = 15,
    seed: Annotated[int, typer.Option(help=_TEXTS.seed_option)] = 1,
    url: Annotated[str | None, typer.Option(help=_TEXTS.url_option)] = None,
    remote: Annotated[bool, typer.Option("--remote", help=_TEXTS.remote_option)] = False,
    as_json: JsonOption = False,
    html: Annotated[str | None, typer.Option(metavar="FILE", help=_TEXTS.html_option)] = None,
    offline: Annotated[bool, typer.Option("--offline", help=_TEXTS.loadtest_offline_option)] = False,
    servers: Annotated[int, typer.Option(min=1, max=64, help=_TEXTS.servers_option)] = 1,
    workers: Annotated[int, typer.Option(min=1, max=64, help=_TEXTS.workers_option)] = 2,
    model_first_seconds: Annotated[float, typer.Option(min=0, max=60, help=_TEXTS.model_first_option)] = 0.3,
    model_reply_seconds: Annotated[float, typer.Option(min=0, max=60, help=_TEXTS.model_reply_option)] = 1.0,
    summary_seconds: Annotated[float, typer.Option(min=0, max=60, help=_TEXTS.summary_seconds_option)] = 2.0,
    model_jitter: Annotated[float, typer.Option(min=0, max=1, help=_TEXTS.model_jitter_option)] = 0.3,
    kill_worker_every: Annotated[float, typer.Option(min=0, max=86_400, help=_TEXTS.kill_worker_option)] = 0.0,
    restart_redis_every: Annotated[float, typer.Option(min=0, max=86_400, help=_TEXTS.restart_redis_option)] = 0.0,
    provider_errors: Annotated[float, typer.Option(min=0, max=1, help=_TEXTS.provider_errors_option)] = 0.0,
) -> None:
    """Put a server under load."""
    _call(
        "loadtest",
        rate=rate,
        conversations=conversations,
        think_seconds=think_seconds,
        duration=duration,
        message_words=message_words,
        seed=seed,
        url=url,
        remote=remote,
        as_json=as_json,
        html=html,
        offline=offline,
        servers=servers,
        workers=workers,
        model_first_seconds=model_first_seconds,
        model_reply_seconds=model_reply_seconds,
        summary_seconds=summary_seconds,
        model_jitter=model_jitter,
        kill_worker_every=kill_worker_every,
        restart_redis_every=restart_redis_every,
        provider_errors=provider_errors,
        given=frozenset(name for name in context.params if _is_given(context, name)),
    )


@app.command(help=_TEXTS.delete_help)
def delete(
    conversation: IdArgument, yes: Annotated[bool, typer.Option("--yes", "-y", help=_TEXTS.yes_option)] = False
) -> None:
    """Forget a conversation."""
    _call("delete", conversation=conversation, yes=yes)


@app.command(help=_TEXTS.rebuild_help)
def rebuild(conversation: IdArgument, as_json: JsonOption = False, offline: OfflineOption = False) -> None:
    """Make a summary anew."""
    _call("rewind", "run_rebuild", conversation=conversation, as_json=as_json, offline=offline)


@app.command(help=_TEXTS.rollback_help)
def rollback(
    conversation: IdArgument,
    version: Annotated[int, typer.Option("--to", metavar="VERSION", min=0, help=_TEXTS.version_option)],
    as_json: JsonOption = False,
) -> None:
    """Take a summary back."""
    _call("rewind", "run_rollback", conversation=conversation, version=version, as_json=as_json)


@app.command(help=_TEXTS.export_help)
def export(conversation: IdArgument) -> None:
    """Write a conversation as JSON."""
    _call("export", conversation=conversation)


@app.command(help=_TEXTS.doctor_help)
def doctor(as_json: JsonOption = False, offline: OfflineOption = False) -> None:
    """Check everything."""
    _call("doctor", as_json=as_json, offline=offline)


def _call(command: str, function: str = "run", **options: object) -> None:
    """Import the module of a command and run it."""
    # Most of the start goes into imports, and a quarter of that into collecting garbage that they do not make.
    gc.disable()
    module = import_module(f"memora.cli.{command}")
    gc.freeze()
    gc.set_threshold(MOST_YOUNG_OBJECTS)
    gc.enable()
    raise typer.Exit(getattr(module, function)(**options))
