"""Run parts of two models, and of the reference in float64, on equal input.

Wherever a state is made, the reference's own state takes its place, so that the next
part starts from equal input. Single modules are called on what the reference's module
was given.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hiddenscope.analyses.drift.observe import map_tensors, tensors_in, to_float64
from hiddenscope.discovery import Anatomy
from hiddenscope.modules import hooks

PRODUCTS = (
    nn.functional.linear,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.mm,
    Tensor.bmm,
)
NARROW = (torch.bfloat16, torch.float16)
LOGITS = "logits"
PARTS = ("", "attn", "cross", "mlp")
Rows = dict[str, Tensor]


class FloatAccumulation(TorchFunctionMode):
    """Accumulate products of bfloat16 and float16 in float32 and round once, as GPUs
    do.

    A CPU without such instructions multiplies them a hundred times slower.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Widen the factors of a product, and round what it gives."""
        named = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **named)
        dtype = tensors_in([args, named])[0].dtype
        if dtype not in NARROW:
            return func(*args, **named)
        wide = map_tensors(args, torch.Tensor.float)
        return func(*wide, **map_tensors(named, torch.Tensor.float)).to(dtype)


@dataclass(frozen=True)
class Batch:
    """Texts of equal length as ids, without padding, and what a decoder reads."""

    ids: Tensor
    targets: Tensor | None = None

    def arguments(self, padding: int = 0) -> dict[str, Tensor]:
        """List the arguments of a model; with padding, columns that are masked."""
        ids = nn.functional.pad(self.ids, (0, padding))
        mask = nn.functional.pad(torch.ones_like(self.ids), (0, padding))
        arguments = {"input_ids": ids, "attention_mask": mask}
        if self.targets is not None:
            arguments["decoder_input_ids"] = self.targets
        return arguments

    def texts(self) -> Iterator["Batch"]:
        """Split the batch into batches of one text."""
        for number in range(len(self.ids)):
            targets = (
                None if self.targets is None else self.targets[number : number + 1]
            )
            yield Batch(self.ids[number : number + 1], targets)


def draw_batches(
    tokens: int, vocabulary: int, seed: int, *, decoder: bool = False
) -> list[Batch]:
    """Draw texts of random ids up to a number of tokens.

    All begin with the same token.
    """
    rng = random.Random(seed)
    batches = []
    count = 0
    while count < tokens:
        texts, length = rng.randint(4, 6), rng.randint(16, 24)
        ids = _draw_ids(rng, texts, length, vocabulary)
        targets = _draw_ids(rng, texts, length, vocabulary) if decoder else None
        batches.append(Batch(ids, targets))
        count += texts * length
    return batches


def _draw_ids(rng: random.Random, texts: int, length: int, vocabulary: int) -> Tensor:
    rows = []
    for _ in range(texts):
        row = [rng.randrange(6, vocabulary) for _ in range(length)]
        rows.append([1, *row[1:]])
    return torch.tensor(rows)


@torch.no_grad()
def state_rows(
    module: nn.Module,
    anatomy: Anatomy,
    batch: Batch,
    put: Rows | None = None,
    *,
    padding: int = 0,
) -> Rows:
    """Run a model and return the rows of every part.

    The rows of `put` replace those that were read.
    """
    rows: Rows = {}
    lengths = {
        "decoder": batch.ids.shape[1]
        if batch.targets is None
        else batch.targets.shape[1]
    }

    def watch(name: str, stack: str | None, tap: Any) -> hooks.Watch:
        def read(tensor: Tensor) -> Tensor | None:
            length = lengths.get(stack or "", batch.ids.shape[1])
            padded = (
                length
                if stack == "decoder" and batch.targets is not None
                else length + padding
            )
            states = tap.layout.states(tensor, padded)
            real = states[:, :length]
            rows[name] = real.reshape(-1, real.shape[-1]).cpu().clone()
            if put is None:
                return None
            changed = states.clone()
            changed[:, :length] = put[name].to(changed).reshape(real.shape)
            replaced: Tensor = tap.layout.with_states(tensor, changed)
            return replaced

        watch: hooks.Watch = tap.watch(module, read)
        return watch

    watches = []
    for site, tap in anatomy.taps.items():
        if site.part in PARTS:
            watches.append(watch(str(site), site.stack, tap))
    device = hooks.input_device(module)
    arguments = map_tensors(batch.arguments(padding), lambda tensor: tensor.to(device))
    with hooks.watching(watches):
        output = module(**arguments)
    logits = getattr(output, LOGITS, None)
    if logits is not None:
        real = logits[:, : lengths["decoder"]]
        rows[LOGITS] = real.reshape(-1, real.shape[-1]).cpu()
    return rows


def split_rows(rows: Rows, batch: Batch) -> list[Rows]:
    """Split rows of a batch into those of its texts."""
    count = len(batch.ids)
    texts: list[Rows] = [{} for _ in range(count)]
    for name, values in rows.items():
        for text, part in zip(texts, values.chunk(count), strict=True):
            text[name] = part
    return texts


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module that holds weights: its input and its output."""

    path: str
    args: Any
    kwargs: Any
    output: Tensor

    @torch.no_grad()
    def repeat(self, module: nn.Module, *, wide: bool = False) -> Tensor | None:
        """Call another module on the same input.

        The result is None if it cannot be called or returns another form.
        """
        args, kwargs = self.args, self.kwargs
        if wide:
            args, kwargs = (
                map_tensors(args, to_float64),
                map_tensors(kwargs, to_float64),
            )
        try:
            output = hooks.first_tensor(module(*args, **kwargs))
        except RuntimeError:
            return None
        same = output is not None and output.shape == self.output.shape
        return output if same else None


@torch.no_grad()
def module_calls(module: nn.Module, batch: Batch) -> list[ModuleCall]:
    """Run a model and return every call of a leaf module that holds weights."""
    calls: list[ModuleCall] = []
    handles = []
    for path, part in module.named_modules():
        if part._modules or not part._parameters:
            continue

        def after(
            _: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path
        ) -> None:
            tensor = hooks.first_tensor(output)
            if tensor is not None and tensor.is_floating_point():
                calls.append(ModuleCall(path, args, kwargs, tensor))

        handles.append(part.register_forward_hook(after, with_kwargs=True))
    try:
        device = hooks.input_device(module)
        module(**map_tensors(batch.arguments(), lambda tensor: tensor.to(device)))
    finally:
        for handle in handles:
            handle.remove()
    return calls
