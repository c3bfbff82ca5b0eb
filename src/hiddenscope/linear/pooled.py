"""A probe of texts that scores every token, and learns with the pooling of its scores.

The loss is that of the pooled score (`states.pooling.SCORE_POOLINGS`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.nn.utils.rnn import pad_sequence

from hiddenscope.linear.logistic import (
    differentiated,
    logistic,
    minimise,
    undo_curvature,
)
from hiddenscope.linear.problems import Fitted, Learner, Problems
from hiddenscope.states.pooling import ScorePooling

# The highest of many windows has kinks, at which a descent goes on in small steps.
MOST_STEPS = 40
# Texts of about one length that are padded to the longest of them.
BATCH = 16


def pooled_logistic(texts: Sequence[Tensor], pooling: ScorePooling) -> Learner:
    """Return logistic regression of two classes of texts `[token, width]`.

    The states must be standardised. The fit takes their means over tokens, by which it
    is conditioned. Descent begins at zero, where every token counts alike; the loss may
    have more than one minimum.
    """
    lengths = torch.tensor([len(text) for text in texts])
    order = lengths.argsort()
    width = texts[0].shape[1]
    batches = []
    for places in torch.split(order, BATCH):
        tokens = pad_sequence([texts[place] for place in places], batch_first=True)
        real = torch.arange(tokens.shape[1]) < lengths[places, None]
        batches.append((tokens, real))

    def score(points: Tensor) -> Tensor:
        query = points[width + 1 :]
        parts = []
        for tokens, real in batches:
            scores = torch.movedim(tokens @ points[:width] + points[width], 2, 0)
            logits = torch.movedim(tokens @ query, 2, 0) if len(query) else None
            parts.append(pooling.reduce(scores, real, logits, pooling.setting))
        return torch.cat(parts, 1)[:, order.argsort()]

    def fit(means: Tensor, problems: Problems) -> Fitted:
        counts = problems.counts
        decay = 0.5 * problems.penalty.to(means) / counts

        def loss(points: Tensor, which: Tensor) -> Tensor:
            scores = score(points)
            losses = softplus(scores) - problems.targets[which] * scores
            value = (losses * problems.train[which]).sum(1) / counts[which]
            squares = points.square().sum(0) - points[width].square()
            return value + decay[which] * squares

        undo = undo_curvature(
            means, problems.penalty, float(counts.sum() / len(counts)), 0.25, 1
        )

        def precondition(gradients: Tensor, which: Tensor) -> Tensor:
            step = undo(gradients[: width + 1].contiguous(), which)
            return torch.cat([step, gradients[width + 1 :]])

        size = width + 1 if pooling.setting else 2 * width + 1
        point, converged = minimise(
            differentiated(loss),
            texts[0].new_zeros(size, len(problems)),
            precondition,
            1e-3,
            MOST_STEPS,
        )
        return Fitted(
            point[:width, None],
            point[width : width + 1],
            converged,
            point[width + 1 :],
            score(point).T[:, None],
        )

    return logistic(2)._replace(fit=fit)
