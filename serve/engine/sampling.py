"""Choosing the next token from logits. Each row is computed by itself, so that its token depends on nothing else.

A draw is a function of (seed, choice, position), not of a generator's state: a request that was preempted, batched
differently or sent again with its seed gets the same tokens.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Many

import torch
from torch import Tensor
from tpshard.programs.scheduling.request import Logprob, Sampling, Sequence


def draw(seed: int, choice: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 bits."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def is_plain(s: Sampling) -> bool:
    """Whether the settings always choose the likeliest token: temperature 0, and logits as they are."""
    return s.temperature == 0 and not is_shaped(s)


def is_shaped(s: Sampling) -> bool:
    """Whether the settings change logits: by penalties, biases or excluded tokens."""
    penalties = s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty
    return bool(penalties or s.logit_bias or s.excluded or s.not_first)


def choose(logits: Tensor, sequences: Many[Sequence]) -> list[tuple[int, Logprob | None]]:
    """The next token of each row of logits [sequences, vocab] fp32, with log-probabilities where requested."""
    likeliest = logits.argmax(-1).tolist()
    out: list[tuple[int, Logprob | None]] = []
    for row, (sequence, greedy) in enumerate(zip(sequences, likeliest)):
        s = sequence.sampling
        token = greedy if is_plain(s) and sequence.may_end else choose_one(logits[row], sequence)
        out.append((token, None if s.logprobs is None else score(logits[row], token, s.logprobs)))
    return out


def choose_one(logits: Tensor, sequence: Sequence) -> int:
    """Chooses the next token of one sequence from its logits [vocab]."""
    s = sequence.sampling
    logits = shape(logits, sequence) if is_shaped(s) or not sequence.may_end else logits
    if s.temperature == 0:
        return int(logits.argmax())
    logits = logits.double()
    # relative to the maximum: a temperature near zero gives zeros and -inf, not inf - inf
    probabilities, tokens = nucleus((logits - logits.max()) / s.temperature, s)
    threshold = draw(s.seed, sequence.choice, len(sequence.tokens)) * float(probabilities.sum())
    index = int(torch.searchsorted(probabilities.cumsum(0), threshold, right=True))
    index = min(index, len(probabilities) - 1)
    while probabilities[index] == 0:  # rounding placed the threshold beyond the last probable token
        index -= 1
    return int(tokens[index]) if tokens is not None else index


def shape(logits: Tensor, sequence: Sequence) -> Tensor:
    """The logits with penalties and bias, as a new tensor; tokens that may not come next are excluded.

    Repetition counts prompt and answer; presence and frequency count the answer.
    """
    s, logits = sequence.sampling, logits.clone()
    if s.repetition_penalty != 1:
        repeated = torch.tensor(sorted(set(sequence.tokens)), dtype=torch.int64)
        values = logits[repeated]
        logits[repeated] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    answer = sequence.answer
    if answer and (s.presence_penalty or s.frequency_penalty):
        answered, counts = torch.tensor(answer, dtype=torch.int64).unique(return_counts=True)
        logits[answered] -= s.presence_penalty + s.frequency_penalty * counts.to(logits.dtype)
    if s.logit_bias:
        ids = torch.tensor([token for token, _ in s.logit_bias], dtype=torch.int64)
        logits[ids] += torch.tensor([bias for _, bias in s.logit_bias], dtype=logits.dtype)
    barred = [word[-1] for word in s.excluded if _ends_with(sequence.tokens, word[:-1])]
    barred += () if sequence.may_end else sequence.stop_tokens
    barred += () if answer else s.not_first
    logits[[token for token in barred if token < len(logits)]] = -torch.inf
    return logits


def _ends_with(tokens: Many[int], end: tuple[int, ...]) -> bool:
    return not end or tuple(tokens[-len(end) :]) == end


def nucleus(logits: Tensor, s: Sampling) -> tuple[Tensor, Tensor | None]:
    """The candidates to draw from: (probabilities, their tokens, or None for all tokens in order).

    Applies top-k, then top-p to the rest (the smallest set that reaches p), then min-p relative to the likeliest.
    """
    if not s.top_k and s.top_p >= 1:
        probabilities = torch.softmax(logits, -1)
        return torch.where(probabilities >= s.min_p * probabilities.max(), probabilities, 0.0), None
    values, tokens = logits.sort(descending=True, stable=True)
    if s.top_k:
        values, tokens = values[: s.top_k], tokens[: s.top_k]
    probabilities = torch.softmax(values, -1)
    before = probabilities.cumsum(0) - probabilities
    keep = (before < s.top_p) & (probabilities >= s.min_p * probabilities[0])
    keep[0] = True
    return torch.where(keep, probabilities, 0.0), tokens


def score(logits: Tensor, token: int, top: int) -> Logprob:
    """The model's log-probability of `token` and of the `top` likeliest tokens."""
    logprobs = torch.log_softmax(logits.double(), -1)
    values, tokens = logprobs.topk(min(top, len(logprobs)))
    return Logprob(token, float(logprobs[token]), tuple(zip(tokens.tolist(), values.tolist())))
