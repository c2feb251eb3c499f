"""The command line ``fusion``: one file of this folder for each sub-command."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from fusion import __version__
from fusion.tools import bench, diff, doctor, explain, kernels, passes, verify
from fusion.tools.console import FAILED, CommandError, talk

# Newer releases of typer bring their own copy of click, so its classes are reached through typer.
_ClickError = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

app = typer.Typer(
    name="fusion",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=_CONTEXT,
    help="Ask what fuses in a model that torch.compile(backend='fusion') would compile, and why.",
    epilog="`fusion COMMAND --help` shows the options and examples of a command. Shell "
    "completion: `fusion --install-completion`.",
)
for _module in (explain, diff, kernels, verify, bench, doctor, passes):
    _name = _module.__name__.rpartition(".")[2]
    app.command(_name, short_help=_module.SHORT, epilog=_module.EPILOG, context_settings=_CONTEXT)(
        _module.command
    )


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fusion {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options before the command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 (a miss) or 2 (usage, internal error)."""
    from fusion.config import ConfigError

    path = list(sys.path)  # a SOURCE that is a function has its folder put there
    try:
        status = app(
            args=None if arguments is None else list(arguments),
            prog_name="fusion",
            standalone_mode=False,
        )
    except (CommandError, ConfigError) as error:
        talk(f"error: {error}")
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        talk("interrupted")
        return FAILED
    except BrokenPipeError:  # `fusion ... | head`
        sys.stderr.close()
        return FAILED
    except Exception as error:
        if isinstance(error, _ClickError):
            error.show(file=sys.stderr)  # type: ignore[attr-defined]
            return FAILED
        talk("internal error; please report it with this text:")
        talk(traceback.format_exc())
        return FAILED
    finally:
        sys.path[:] = path
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
