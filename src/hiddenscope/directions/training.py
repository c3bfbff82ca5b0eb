"""Training: a sparse dictionary fitted to states, by BatchTopK.

Of all products of a batch of states with the encoder, the k times batch largest count,
wherever they lie, and only what they stand for is decoded. The smallest that counted,
averaged over steps, becomes the threshold of the dictionary (JumpReLU), which then
needs no batch. What is random follows from the seed, and sums are made in one order:
a run that was interrupted goes on to the numbers that it would have given.

Bussmann et al. 2024 (BatchTopK) and 2025 (Matryoshka); Gao et al. 2024 (dead features).
"""

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from hiddenscope import progress
from hiddenscope.arguments import checked, integer
from hiddenscope.directions.encoding import Encoding
from hiddenscope.directions.feed import Feed
from hiddenscope.directions.layouts import StoredDictionary
from hiddenscope.errors import FileError, NotFinite, StatesError
from hiddenscope.files import read_tensors, write_tensors
from hiddenscope.loading.checkpoint import usable_device
from hiddenscope.measures.massive import is_massive, length_limit
from hiddenscope.modules import autograd

# The learning rate of 2**14 features; it falls with the root of their number.
RATE = 2e-4
WARMUP_STEPS = 1000
# The part of all steps over which the rate falls to zero.
DECAY = 0.2
# The weight of the newest step in the moving averages of the threshold and of the
# variance that is left: at least this, and at first this over the number of steps.
AVERAGED, RECENT = 0.01, 0.1
SETTLING = 10
# The weight of what dead features leave of the error.
REVIVAL = 1 / 32
LONGEST_IDLE = 10_000_000
# Products below this share of the threshold are not looked at first.
LIKELY = 0.8
# Steps after which it is looked which features are dead, and a run may stop.
ROUND = 16
# At least so many states are measured: all are scaled by their mean and their size.
MEASURED = 4096
SAVED_EVERY_S = 60.0
FORMAT = "hiddenscope.training/1"
# How far the means of the same states may be apart, for the size of states.
SAME = 1e-3


@checked
@dataclass(frozen=True)
class Training:
    """Say how a dictionary is trained.

    `tokens` is how many states it is trained on in all, over as many passes as that
    takes, rounded up to whole batches; `batch` is how many are used at once. `prefixes`
    makes it a Matryoshka: the first 128 features, the first 512 and all of them must
    each do alone with (128, 512). `rate` is the learning rate, by default 2e-4 /
    sqrt(features / 2**14). The states of first tokens, and massive ones, are left out
    unless `first_tokens`: they are often a hundred times as large as the others.
    `device` is by default that of the model or the states; a store's are on the CPU.
    """

    tokens: int = 10_000_000
    batch: int = 4096
    prefixes: tuple[int, ...] = ()
    rate: float | None = None
    first_tokens: bool = False
    seed: int = 0
    device: str | None = None


class Trainer:
    """The numbers that training changes, and one step of it."""

    def __init__(
        self, width: int, features: int, k: int, training: Training, steps: int
    ) -> None:
        generator = torch.Generator().manual_seed(training.seed)
        drawn = normalize(torch.randn(features, width, generator=generator)).view(-1)
        biases = drawn.new_zeros(features + width)
        self.weights = torch.cat([drawn, drawn, biases]).to(training.device)
        zeros = self.weights.new_zeros
        # What is subtracted from states, and what they are then divided by.
        self.mean, self.size = zeros(width), zeros(())
        # States that are longer are massive.
        self.limit = zeros(()) + torch.inf
        # Averages: the smallest activation that counts, and the share of variance left.
        self.threshold, self.unexplained = zeros(()), zeros(())
        # The states since each feature acted last.
        self.idle = zeros(features, dtype=torch.int64)
        # All that the next step depends on: what is above, and what Adam has and needs
        # (it takes this very mapping as its state).
        self.tensors: dict[str, Tensor] = {**vars(self), "step": zeros(())}
        for name in ("exp_avg", "exp_avg_sq"):
            self.tensors[name] = torch.zeros_like(self.weights)
        self.optimizer = torch.optim.Adam([self.weights.requires_grad_()], fused=True)
        self.optimizer.state[self.weights] = self.tensors
        self.k, self.training, self.step, self.steps = k, training, 0, steps
        starts = (0, *training.prefixes)
        self.group_starts = torch.tensor(starts, device=self.weights.device)
        self.dead = self.group_starts[:0]

    def parts(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the directions, the encoder, its bias, and the decoder's bias."""
        features, width = len(self.idle), len(self.mean)
        sizes = [features * width, features * width, features, width]
        directions, encoder, encoder_bias, bias = weights.split_with_sizes(sizes)
        shape = features, width
        return directions.view(shape), encoder.view(shape), encoder_bias, bias

    def measure(self, states: Tensor) -> None:
        """Measure the mean and the size of states, and scale the encoder to them."""
        if not self.training.first_tokens:
            self.limit.copy_(length_limit([states]))
        rows = states[~is_massive(states, self.limit)].double()
        self.mean.copy_(rows.mean(0))
        self.size.copy_((rows - self.mean).square().sum(1).mean().sqrt())
        if not self.size > 0:
            reason = "all states are equal"
            raise StatesError("Cannot fit a dictionary", reason, "Give other texts.")
        with autograd.restored(), torch.no_grad():
            values, *_, missed = self._encoded(scaled := self._scaled(states))
        # Random directions that are near a state are near one another: their sum would
        # be too long by far, and all would first be pushed away. Of the decoded d the
        # least squares are at <x, d> / <d, d>, and <x, d> is the sum of the squares of
        # activations, which are products of x with these same directions.
        length = (missed[:, -1] + scaled).square().sum()
        shorter = values.relu().square().sum() / length
        self.parts(self.weights.detach())[1].mul_(shorter)

    def _scaled(self, states: Tensor) -> Tensor:
        """Return states in units of training, where massive ones are as their mean."""
        scaled = (states - self.mean) / self.size
        return scaled.masked_fill(is_massive(states, self.limit)[:, None], 0.0)

    def _encoded(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the values that count, their features, all products, and what is
        missed by each group of features with those before it.
        """
        directions, encoder, encoder_bias, bias = self.parts(self.weights)
        shift = encoder_bias - encoder @ bias
        products = torch.addmm(shift, states, encoder.T)
        flat = products.view(-1)
        places = self._largest(flat.detach(), self.k * len(states))
        values = flat.index_select(0, places)
        # Decoding is a weighted sum of directions, and embedding_bag sums rows by bags:
        # here what acts in a state, by groups of features.
        numbers = torch.arange(len(states), device=states.device)
        marks = (numbers[:, None] * len(directions) + self.group_starts).view(-1)
        columns = places % len(directions)
        decoded = embedding_bag(
            columns,
            directions,
            torch.searchsorted(places, marks),
            mode="sum",
            per_sample_weights=values.relu(),
        )
        decoded = decoded.view(len(states), -1, len(bias)).cumsum(1)
        return values, columns, products, decoded + (bias - states)[:, None]

    def learn(self, states: Tensor) -> None:
        """Make one step with a batch of states."""
        if self.step % ROUND == 0:
            # Some of the dead, at random.
            dead = self.is_dead.nonzero()[:, 0]
            generator = np.random.default_rng((self.training.seed, self.step))
            some = generator.permutation(len(dead))[: len(self.mean)]
            self.dead = dead[torch.from_numpy(some).to(dead.device)]
        states = self._scaled(states)
        values, columns, products, missed = self._encoded(states)
        loss = missed.square().sum() / missed[..., 0].numel()
        last = missed[:, -1].detach()
        if len(self.dead):
            spread = (last - last.mean(0)).square().sum().clamp_min(1e-12)
            again = self._revived(products)
            loss = loss + REVIVAL * (again + last).square().sum() / spread
        (self.weights.grad,) = torch.autograd.grad(loss, self.weights)
        self._update()
        self.idle += len(states)
        self.idle[columns] = 0
        # Scaled states are of length 1 in the mean of squares.
        left = last.square().sum() / len(states)
        # Both begin at 0, and the first steps must not count for long.
        newest = min(1.0, SETTLING / self.step)
        self.unexplained.lerp_(left, max(RECENT, newest))
        smallest = values.detach().min().relu()
        self.threshold.lerp_(smallest, max(AVERAGED, newest))

    def _largest(self, products: Tensor, count: int) -> Tensor:
        """Return the places of the largest products, in order.

        Those that are likely among them are looked at first: if they are enough, the
        others are smaller.
        """
        likely = (products > LIKELY * self.threshold).nonzero()[:, 0]
        if len(likely) >= count:
            values = products.index_select(0, likely)
            places = likely[values.topk(count, sorted=False).indices]
        else:
            places = products.topk(count, sorted=False).indices
        return places.sort().values

    @property
    def is_dead(self) -> Tensor:
        """Tell of each feature whether it has not acted for long."""
        return self.idle > min(LONGEST_IDLE, self.training.tokens // 10)

    def _revived(self, products: Tensor) -> Tensor:
        """Decode the strongest features in `dead`, at most half a width in a state."""
        some = products[:, self.dead].relu()
        most = min(len(self.dead), max(1, len(self.mean) // 2))
        is_large = some >= some.detach().topk(most).values[:, -1:]
        return (some * is_large) @ self.parts(self.weights)[0][self.dead]

    def _update(self) -> None:
        weights = self.weights.detach()
        directions = self.parts(weights)[0]
        assert self.weights.grad is not None
        turning = self.parts(self.weights.grad)[0]
        # Directions keep their length, so only what turns them counts.
        along = (turning * directions).sum(1, keepdim=True)
        turning.addcmul_(along, directions, value=-1)
        self.step += 1
        risen = self.step / min(WARMUP_STEPS, 1 + self.steps // 20)
        fallen = (self.steps + 1 - self.step) / (1 + DECAY * self.steps)
        rate = self.training.rate or RATE / (len(directions) / 2**14) ** 0.5
        self.optimizer.param_groups[0]["lr"] = rate * min(1.0, risen, fallen)
        self.optimizer.step()
        directions.copy_(normalize(directions))

    def dictionary(self, site: str, **facts: Any) -> StoredDictionary:
        """Return the dictionary in the units of the states."""
        directions, encoder, encoder_bias, bias = self.parts(self.weights.detach())
        threshold = (self.threshold * self.size).expand(len(directions)).clone()
        left, dead = float(self.unexplained), int(self.is_dead.sum())
        return StoredDictionary(
            directions.clone(),
            encoder.T.contiguous(),
            encoder_bias * self.size,
            bias * self.size + self.mean,
            site,
            site,
            Encoding("threshold", threshold=threshold, centred=True),
            facts={"origin": "fitted", **facts, "unexplained": left, "dead": dead},
        )


def train(
    feed: Feed, features: int, k: int, training: Training, checkpoint: Path | None
) -> StoredDictionary:
    """Train a dictionary, from where the checkpoint is if there is one."""
    _check(feed, features, k, training)
    batch = min(training.batch, feed.rows)
    device = str(usable_device(training.device or feed.device))
    training = replace(training, batch=batch, device=device)
    trainer = Trainer(feed.width, features, k, training, -(-training.tokens // batch))
    trainer.measure(feed.sample(max(batch, MEASURED), training.seed, device))
    plan = {"site": feed.site, "model": feed.model, "rows": feed.rows}
    plan |= {"features": features, "k": k, **asdict(training)}
    if checkpoint is not None and checkpoint.exists():
        _restore(checkpoint, trainer, plan)
    stopping = threading.Event()
    problem = f"Cannot fit a dictionary to {feed.site}"

    def run() -> None:
        # Better now than after an hour if nothing can be written there.
        save()
        saved = time.monotonic()
        batches = feed.batches(batch, training.seed, trainer.step, device)
        with progress.track("Training", total=trainer.steps) as advance:
            advance(trainer.step)
            while trainer.step < trainer.steps and not stopping.is_set():
                for states in islice(batches, min(ROUND, trainer.steps - trainer.step)):
                    trainer.learn(states)
                    advance(1)
                if not bool(trainer.weights.isfinite().all()):
                    reason = "the weights grow without bound"
                    raise NotFinite(problem, reason, "Give a lower rate.")
                if time.monotonic() > saved + SAVED_EVERY_S:
                    save()
                    saved = time.monotonic()
        save()

    def save() -> None:
        if checkpoint is not None:
            header = {"format": FORMAT, "plan": json.dumps(plan)}
            write_tensors(checkpoint, trainer.tensors, header)

    # Ctrl-C reaches the thread that waits, and never cuts a step in two.
    with ThreadPoolExecutor(1, "training") as thread:
        running = thread.submit(run)
        try:
            running.result()
        finally:
            stopping.set()
    facts = {name: plan[name] for name in ("model", "rows", "k", "seed")}
    return trainer.dictionary(feed.site, tokens=trainer.steps * batch, **facts)


def _check(feed: Feed, features: int, k: int, training: Training) -> None:
    integer(features, "features", 1)
    integer(k, "k", 1)
    integer(training.tokens, "tokens", 1)
    integer(training.batch, "batch", 2)
    integer(training.seed, "seed", 0)
    problem = f"Cannot fit {features:,} features to {feed.site}"
    if feed.rows < features:
        reason = f"there are {feed.rows:,} states, besides those of first tokens"
        raise StatesError(problem, reason, "Give more texts, or ask for fewer.")
    if k > features:
        reason = f"k is {k}, and there are {features:,} features"
        raise StatesError(problem, reason, f"Give k from 1 to {features}.")
    ends = [0, *training.prefixes, features]
    for end in ends:
        integer(end, "a prefix", 0)
    if ends != sorted(set(ends)):
        reason = f"the prefixes are {training.prefixes}"
        raise StatesError(problem, reason, f"Give rising numbers below {features}.")
    if training.rate is not None and not 0 < training.rate < math.inf:
        reason = f"the learning rate is {training.rate}"
        raise StatesError(problem, reason, "Give one above 0, such as 2e-4, or none.")


def _restore(path: Path, trainer: Trainer, plan: dict[str, Any]) -> None:
    problem, remedy = f"Cannot go on from {path.name}", "Give another path."
    tensors, header = read_tensors(path, "a checkpoint", FORMAT)
    earlier = json.loads(header["plan"])
    for name, value in json.loads(json.dumps(plan)).items():
        if earlier.get(name) != value:
            reason = f"it is of another run: {name} was {earlier.get(name)}"
            remedy = f"Give {name}={earlier.get(name)}, or another path."
            raise FileError(problem, reason, remedy)
    mean = trainer.mean.clone()
    for name, tensor in trainer.tensors.items():
        tensor.detach().copy_(tensors[name])
    # The same states give the same mean, but for rounding on another machine.
    if not (trainer.mean - mean).norm() < SAME * trainer.size:
        reason = "it is of another run: the states there have another mean"
        raise FileError(problem, reason, f"Give the same texts, or {remedy[5:]}")
    trainer.step = int(trainer.tensors["step"])
