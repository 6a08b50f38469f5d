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


@app.command(help=_TEXTS.delete_help)
def delete(
    conversation: IdArgument, yes: Annotated[bool, typer.Option("--yes", "-y", help=_TEXTS.yes_option)] = False
) -> None:
    """Forget a conversation."""
    _call("delete", conversation=conversation, yes=yes)


@app.command(help=_TEXTS.export_help)
def export(conversation: IdArgument) -> None:
    """Write a conversation as JSON."""
    _call("export", conversation=conversation)


@app.command(help=_TEXTS.doctor_help)
def doctor(as_json: JsonOption = False, offline: OfflineOption = False) -> None:
    """Check everything."""
    _call("doctor", as_json=as_json, offline=offline)


def _call(command: str, **options: object) -> None:
    """Import the module of a command and run it."""
    # Most of the start goes into imports, and a quarter of that into collecting garbage that they do not make.
    gc.disable()
    module = import_module(f"memora.cli.{command}")
    gc.freeze()
    gc.enable()
    raise typer.Exit(module.run(**options))
