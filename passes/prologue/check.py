"""Translation validation: the replaced nodes against the canonical operation, on small inputs.

The very nodes that a rewrite would replace are run (see :mod:`fusion.match.region`) on random
and on awkward values, and compared with the reference of the operation that carries the
attributes that were read: every bit of q, of k where it is returned, and of the whole cache.
Nothing is rewritten on the strength of a pattern alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fusion.config import Config
from fusion.fingerprint import digest_of
from fusion.graph import compat
from fusion.graph.provenance import source_of
from fusion.graph.shapes import NoHintError, hint
from fusion.match.facts import CachePlane, RopeTable, Slots, TokenView
from fusion.match.region import Region, RegionError
from fusion.passes.prologue.chain import Chain
from fusion.passes.prologue.operation import Operation
from fusion.passes.prologue.trial import Trial, same_bits
from fusion.reason import Reason

#: Small token counts of the two trials: (sequences, tokens of each).
TRIALS = ((2, 3), (3, 5))


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


def check(chain: Chain, operation: Operation, config: Config, cache: dict[Any, Any]) -> Checked:
    """Compare a chain with its operation.

    Sites of equal structure and attributes share one check through ``cache``. Never raises for
    a graph: what cannot be run small is refused with ``match.validation-bound`` and the node.
    Time is the thread's own CPU time: a busy machine must not change what is fused.
    """
    started = time.thread_time()
    try:
        roles = _roles(operation)
        twins = getattr(chain.write, "twins", {})
        roles |= {twin: roles[same] for twin, same in twins.items() if same in roles}
        outputs = _outputs(chain, operation)
        region = Region.between(roles, list(outputs))
        key = digest_of((region.fingerprint(roles), _signature(chain, operation, roles, outputs)))
        if (known := cache.get(key)) is not None:
            key_node = chain.k_rope.out.node
            reason = known.reason and known.reason.at(key_node.name, source_of(key_node))
            return Checked(known.status, known.max_abs_error, 0.0, reason, True)
        with compat.real_tensors():
            result = _run_trials(chain, operation, region, roles, outputs, config, started)
    except NoHintError as error:
        reason = Reason("match.validation-bound", f"a size has no example value: {error}")
        return Checked("refused", reason=reason, seconds=time.thread_time() - started)
    except RegionError as error:
        node = error.node.name if error.node is not None else None
        code = "match.validation" if "depends on" in str(error) else "match.validation-bound"
        reason = Reason(code, f"the chain could not be run by itself: {error}", node=node)
        return Checked("refused", reason=reason, seconds=time.thread_time() - started)
    cache[key] = result
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
    limit = config.validation_mb * 2**20

    def tick(node: Node, held: int) -> None:
        if time.thread_time() - started > config.validation_seconds or held > limit:
            raise _Bound(node.name)

    for seed, (sequences, tokens) in enumerate(TRIALS):
        try:
            message, worst = _one_trial(
                chain, operation, region, roles, outputs, (sequences, tokens, seed), tick
            )
        except _Bound as stop:
            reason = Reason(
                "match.validation-bound",
                "the check did not finish within its bounds",
                have=f"{time.thread_time() - started:.2f} s of CPU time",
                need=f"{config.validation_seconds} s of CPU time and {config.validation_mb} MB",
                node=str(stop),
            )
            return Checked("refused", reason=reason, seconds=time.thread_time() - started)
        if message is not None:
            reason = Reason(
                "match.validation",
                message,
                have=f"max abs error {worst:.3g}",
                need="bit-equal",
                node=chain.k_rope.out.node.name,
            )
            seconds = time.thread_time() - started
            return Checked("refused", worst, seconds, reason)
    return Checked("passed", 0.0, time.thread_time() - started)


def check_operands(
    chain: Chain, operation: Operation, arguments: Mapping[str, Any]
) -> Reason | None:
    """Whether emitted nodes compute the operands that the check used; the reason if not.

    ``arguments`` are those of the emitted call by name. Cache planes are left out (the surgeon
    verifies their geometry itself), and slots that are built from constants of the cache.
    """
    roles = _roles(operation)
    with compat.real_tensors():
        trial = Trial(chain, operation, roles, *TRIALS[0], 0)
        expected: Tensor | None
        for name, operand in operation.tensors.items():
            node = arguments.get(name)
            if isinstance(operand, CachePlane) or not isinstance(node, Node):
                continue
            what = f"operand {name} of the new call"
            try:
                region = Region.between(roles, [node])
                values, _ = region.run(trial.inputs, widen=trial.widen)
            except RegionError as error:
                if isinstance(operand, Slots):
                    continue
                text = f"{what} could not be run by itself: {error}"
                return Reason("match.validation-bound", text, node=node.name)
            if name == "positions":
                assert isinstance(operand, Node)
                expected = trial.positions(operand, full_size=True)
            elif isinstance(operand, Slots):
                assert trial.cache is not None
                expected = trial.cache.slot_mapping(operand, trial.inputs, full_size=True)
            else:
                expected = trial.argument(operand, {})
            have = values[node]
            assert expected is not None
            if have.shape != expected.shape or not same_bits(have, expected.to(have.dtype)):
                text = f"{what} is not what the chain reads"
                return Reason("match.validation", text, node=node.name)
    return None


def _one_trial(
    chain: Chain,
    operation: Operation,
    region: Region,
    roles: Mapping[Node, str],
    outputs: Mapping[Node, str],
    numbers: tuple[int, int, int],
    tick: Callable[[Node, int], None],
) -> tuple[str | None, float]:
    """Run one trial, in the first of three ways that can be run at all.

    A size that an expand makes out of nothing may be a token count, or a constant that happens
    to equal it (``repeat_interleave(x, 2)`` in a graph of two tokens): both are tried. Last
    come the sizes of the graph itself, which need no guess but may exceed the bounds.
    """
    failed: RegionError | None = None
    for widen, shrink in ((True, True), (False, True), (False, False)):
        try:
            trial = Trial(chain, operation, roles, *numbers, widen=widen, shrink=shrink)
            return trial.compare(region, outputs, tick)
        except RegionError as error:
            failed = failed or error
    assert failed is not None
    raise failed


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
        if isinstance(value, torch.SymInt):
            return str(hint(value))
        return str(value)

    tensors = [f"{n}={plain(o)}" for n, o in operation.tensors.items()]
    results = [plain(chain.q_rope.out), plain(chain.k_rope.out), *outputs.values()]
    if chain.write is not None:
        results += [f"{labels.get(n, '?')}:{i}" for n, i in chain.write.results.items()]
        results += [plain(b) for b in chain.write.bases]
    attributes = sorted(map(str, operation.attributes.items()))
    return f"{operation.name}({tensors}, {attributes}, {operation.kv_layout}) -> {results}"
