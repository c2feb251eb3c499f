"""Translation validation: the replaced nodes against the canonical operation, on small inputs.

The very nodes that a rewrite would replace are run (see :mod:`fusion.match.region`) on random
and on awkward values, and compared with the reference of the operation that carries the
attributes that were read: every bit of q, of k where it is returned, and of the whole cache.
Nothing is rewritten on the strength of a pattern alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import SymInt
from torch.fx import Node

from fusion.config import Config
from fusion.fingerprint import digest_of
from fusion.graph import compat
from fusion.graph.provenance import source_of
from fusion.graph.shapes import NoHintError, hint
from fusion.match.facts import CachePlane, RopeTable, Slots, TokenView
from fusion.match.region import Region, RegionError
from fusion.passes.prologue.chain import Chain
from fusion.passes.prologue.dependent import equal_tables, half_a_table, made_inside
from fusion.passes.prologue.operation import Operand, Operation
from fusion.passes.prologue.trial import Trial, no_count, same_bits, small_sizes, token_counts
from fusion.pipeline import Context
from fusion.reason import Reason

#: Small token counts of the two trials: (sequences, tokens of each).
TRIALS = ((2, 3), (3, 5))
_MOST_GUESSES = 5
"""Sizes of unknown meaning whose meanings are all tried in combination."""


@dataclass(frozen=True)
class Checked:
    """The result of a check: ``passed``, ``refused`` (with the reason) or ``off``."""

    status: str
    max_abs_error: float = 0.0
    seconds: float = 0.0
    reason: Reason | None = None
    reused: bool = False

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping for the report."""
        return {
            "status": self.status,
            "max_abs_error": self.max_abs_error,
            "seconds": round(self.seconds, 6),
            "reused": self.reused,
        }


class _Bound(Exception):
    """The check needs more time or memory than allowed."""


def check(chain: Chain, operation: Operation, context: Context) -> Checked:
    """Compare a chain with its operation.

    Sites of equal structure and attributes share one check (``context.validations``). Never
    raises for a graph: what cannot be run small is refused with ``match.validation-bound`` and
    the node.
    Time is the thread's own CPU time: a busy machine must not change what is fused.
    """
    started = time.thread_time()
    if (half := half_a_table(chain)) is not None:
        return Checked("refused", reason=half)
    try:
        roles = _roles(operation)
        twins = {**getattr(chain.write, "twins", {}), **equal_tables(chain)}
        roles |= {twin: roles[same] for twin, same in twins.items() if same in roles}
        outputs = _outputs(chain, operation)
        made = made_inside(chain, roles)
        region = Region.between(roles.keys() - made, list(outputs))
        # What the check computes is no input of the region: its place must be told apart as well.
        places = [i for i, node in enumerate(region.nodes) if node in made]
        signature = _signature(chain, operation, roles, outputs)
        key = digest_of((region.fingerprint(roles), signature, str(places)))
        if (known := context.validations.get(key)) is not None:
            key_node = chain.k_rope.out.node
            reason = known.reason and known.reason.at(key_node.name, source_of(key_node))
            return Checked(known.status, known.max_abs_error, 0.0, reason, True)
        with compat.real_tensors():
            result = _run_trials(chain, operation, region, roles, outputs, context.config, started)
    except NoHintError as error:
        reason = Reason("match.validation-bound", f"a size has no example value: {error}")
        return Checked("refused", reason=reason, seconds=time.thread_time() - started)
    except RegionError as error:
        node = error.node.name if error.node is not None else None
        reason = Reason(error.code, f"the chain could not be run by itself: {error}", node=node)
        return Checked("refused", reason=reason, seconds=time.thread_time() - started)
    context.remember(key, result)
    return result


def _run_trials(
    chain: Chain,
    operation: Operation,
    region: Region,
    roles: Mapping[Node, str],
    outputs: Mapping[Node, str],
    config: Config,
    started: float,
) -> Checked:
    tick = _ticker(config, started)

    def spent() -> float:
        return time.thread_time() - started

    difference: Checked | None = None
    failed: RegionError | None = None
    for reading in _readings(region, operation):
        try:
            message, worst = _trials(chain, operation, region, roles, outputs, reading, tick)
        except RegionError as error:
            failed = failed or error
            continue
        except _Bound as stop:
            if difference is not None:
                break  # a reading that gave a result says more than one that took too long
            return Checked("refused", reason=_too_much(config, started, stop), seconds=spent())
        if message is None:
            return Checked("passed", 0.0, spent())
        reason = Reason(
            "match.validation",
            message,
            have=f"max abs error {worst:.3g}",
            need="bit-equal",
            node=chain.k_rope.out.node.name,
        )
        difference = difference or Checked("refused", worst, spent(), reason)
        if not _unsure(region, operation):
            break  # it was the only reading there is
    if difference is not None:
        return difference
    assert failed is not None
    raise failed


def _too_much(config: Config, started: float, stop: _Bound) -> Reason:
    return Reason(
        "match.validation-bound",
        "the check did not finish within its bounds",
        have=f"{time.thread_time() - started:.2f} s of CPU time",
        need=f"{config.validation_seconds} s of CPU time and {config.validation_mb} MB",
        node=str(stop),
    )


def _ticker(config: Config, started: float) -> Callable[[Node, int], None]:
    """Raises :class:`_Bound` where the thread took too long or a run holds too much."""
    limit = config.validation_mb * 2**20

    def tick(node: Node, held: int) -> None:
        if time.thread_time() - started > config.validation_seconds or held > limit:
            raise _Bound(node.name)

    return tick


@dataclass(frozen=True)
class _Reading:
    """One way to make the graph small: ``constant`` expands keep the sizes they have."""

    shrink: bool
    constant: frozenset[Node] = frozenset()


def _readings(region: Region, operation: Operation) -> Iterator[_Reading]:
    """The ways to shrink a region, likeliest first.

    A size that an expand makes out of nothing may be a token count, or a constant that happens
    to equal it: two tokens and ``repeat_interleave(x, 2)``, as many tokens as elements in a
    head and a scatter index expanded over the head. Each is tried. Last come the sizes of the
    graph itself, which need no guess but may exceed the bounds. A wrong reading does not pass:
    shapes stop fitting, or the results differ; the operation has the same shapes in all.
    Where token counts are symbols nothing has to be guessed.
    """
    unsure = _unsure(region, operation)
    yield _Reading(True)
    if unsure:
        yield _Reading(True, frozenset(unsure))
    if 1 < len(unsure) <= _MOST_GUESSES:
        for count in range(1, len(unsure)):
            for some in itertools.combinations(unsure, count):
                yield _Reading(True, frozenset(some))
    yield _Reading(False)


def _unsure(region: Region, operation: Operation) -> tuple[Node, ...]:
    counts = token_counts(operation)
    small = small_sizes(operation, *TRIALS[0])
    return region.guesses(small, lambda _, size: no_count(counts, size))


def _trials(
    chain: Chain,
    operation: Operation,
    region: Region,
    roles: Mapping[Node, str],
    outputs: Mapping[Node, str],
    reading: _Reading,
    tick: Callable[[Node, int], None],
) -> tuple[str | None, float]:
    """The first difference that any trial of one reading shows, and its size."""
    for seed, (sequences, tokens) in enumerate(TRIALS):
        trial = Trial(
            chain,
            operation,
            roles,
            sequences,
            tokens,
            seed,
            shrink=reading.shrink,
            constant=reading.constant,
        )
        message, worst = trial.compare(region, outputs, tick)
        if message is not None:
            return message, worst
    return None, 0.0


def check_operands(
    chain: Chain, operation: Operation, arguments: Mapping[str, Any], config: Config
) -> Reason | None:
    """Whether emitted nodes compute the operands that the check used; the reason if not.

    ``arguments`` are those of the emitted call by name. Cache planes are left out (the surgeon
    verifies their geometry itself), and slots that are built from constants of the cache where
    the graph is too large to run at its own sizes. Bounded like :func:`check`.
    """
    roles = _roles(operation)
    tick = _ticker(config, started := time.thread_time())
    with compat.real_tensors():
        trials: dict[_Reading, Trial | RegionError] = {}
        for name, operand in operation.tensors.items():
            node = arguments.get(name)
            if isinstance(operand, CachePlane) or not isinstance(node, Node):
                continue
            try:
                reason = _operand(chain, operation, roles, (name, operand, node), trials, tick)
            except _Bound as stop:
                return _too_much(config, started, stop)
            if reason is not None:
                return reason
    return None


def _operand(
    chain: Chain,
    operation: Operation,
    roles: Mapping[Node, str],
    emitted: tuple[str, Operand, Node],
    trials: dict[_Reading, Trial | RegionError],
    tick: Callable[[Node, int], None],
) -> Reason | None:
    """One operand of the new call in the first reading that agrees, or the reason."""
    name, operand, node = emitted
    what = f"operand {name} of the new call"
    failed: RegionError | None = None
    differs = False
    try:
        region = Region.between(roles, [node])
    except RegionError as error:
        text = f"{what} could not be run by itself: {error}"
        return Reason("match.validation-bound", text, node=node.name)
    for reading in _readings(region, operation):
        try:
            if reading not in trials:
                trials[reading] = _trial(chain, operation, roles, reading)
            trial = trials[reading]
            if isinstance(trial, RegionError):
                raise trial
            values, _ = region.run(
                trial.inputs, widen=trial.small, tick=tick, constant=trial.constant
            )
        except RegionError as error:
            failed = failed or error
            continue
        have, expected = values[node], trial.operand(name, operand)
        if have.shape == expected.shape and same_bits(have, expected.to(have.dtype)):
            return None
        differs = True
    if differs:
        return Reason("match.validation", f"{what} is not what the chain reads", node=node.name)
    if isinstance(operand, Slots):
        return None
    text = f"{what} could not be run by itself: {failed}"
    return Reason("match.validation-bound", text, node=node.name)


def _trial(
    chain: Chain, operation: Operation, roles: Mapping[Node, str], reading: _Reading
) -> Trial | RegionError:
    try:
        return Trial(
            chain,
            operation,
            roles,
            *TRIALS[0],
            0,
            shrink=reading.shrink,
            constant=reading.constant,
        )
    except RegionError as error:
        return error


def _roles(operation: Operation) -> dict[Node, str]:
    """Every node that the operation reads, with the name of its role."""
    roles: dict[Node, str] = {}
    for name, operand in operation.tensors.items():
        if isinstance(operand, Node):
            roles.setdefault(operand, name)
        elif isinstance(operand, (TokenView, RopeTable)):
            roles.setdefault(operand.node, name)
        elif isinstance(operand, Slots):
            if operand.kind == "range":
                continue  # its bounds are arguments of the write itself
            roles.setdefault(operand.node, name)
            if operand.offset is not None:
                roles.setdefault(operand.offset, "slot_offset")
        elif isinstance(operand, CachePlane):
            roles.setdefault(operand.base, name)
    return roles


def _outputs(chain: Chain, operation: Operation) -> dict[Node, str]:
    """Every node that the operation's results replace."""
    outputs: dict[Node, str] = {chain.q_rope.out.node: "query"}
    if chain.write is None or operation.attributes.get("return_key"):
        outputs[chain.k_rope.out.node] = "key"
    if chain.write is not None:
        for node in chain.write.results:
            # A content between the writes of K and V holds only one of them; nothing reads it.
            if not any(user in chain.write.nodes for user in node.users):
                outputs[node] = "cache"
    return outputs


def _signature(
    chain: Chain, operation: Operation, roles: Mapping[Node, str], outputs: Mapping[Node, str]
) -> str:
    """Everything about the facts that changes what is compared, nodes given by their roles."""
    labels = {node: f"out{i}" for i, node in enumerate(outputs)} | dict(roles)

    def plain(value: Any) -> str:
        if isinstance(value, Node):
            return labels.get(value, "?")
        if dataclasses.is_dataclass(value):
            parts = (plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr)
            return f"{type(value).__name__}({', '.join(parts)})"
        if isinstance(value, (tuple, list)):
            return f"[{', '.join(map(plain, value))}]"
        if isinstance(value, SymInt):
            return str(hint(value))
        return str(value)

    tensors = [f"{n}={plain(o)}" for n, o in operation.tensors.items()]
    results = [plain(chain.q_rope.out), plain(chain.k_rope.out), *outputs.values()]
    if chain.write is not None:
        results += [f"{labels.get(n, '?')}:{i}" for n, i in chain.write.results.items()]
        results += [plain(b) for b in chain.write.bases]
    attributes = sorted(map(str, operation.attributes.items()))
    return f"{operation.name}({tensors}, {attributes}, {operation.kv_layout}) -> {results}"
