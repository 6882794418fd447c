"""Tasks of lm-eval on a stored model, through lm-eval's Python interface and the server's engine, without a server."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes

if TYPE_CHECKING:
    from tpshard.cli.shared.source_model import SourceModel
    from tpshard.models.folders.folder_tokenizer import FolderTokenizer
    from tpshard.programs.scheduling.request import Sequence as Answering
    from tpshard.recipes.keys.schema import Recipe
    from tpshard.serve.api.service import Service
    from tpshard.train.checkpoints.store_path import Location

MOST_TOKENS = 256
"""Tokens of an answer where a task names no limit (lm-eval's default)."""


class EngineLM:
    """The three requests of lm-eval's models, computed by the server's engine. Log-likelihoods are sums in nats.

    Texts are encoded as lm-eval's own models do: without special tokens, spaces at a context's end are those of the
    continuation, and what exceeds the model's length is cut at the left.
    """

    def __init__(self, service: Service, tokenizer: FolderTokenizer, begin: int, limit: int | None = None):
        """begin: the token before a text without context. limit: most tokens; default: the model's."""
        self.service, self.tokenizer, self.begin = service, tokenizer, begin
        self.longest = min(limit or service.limit, service.limit) - 1

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether it is the greedy one) of each (context, continuation)."""
        return self._scores([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, read in windows that predict every token once."""
        windows = [list(self._windows(self.tokenizer.encode(request.args[0], special=False))) for request in requests]
        scores = iter(self._scores([window for several in windows for window in several]))
        return [sum(next(scores)[0] for _ in several) for several in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to the first text of `until`."""
        from tpshard.programs.scheduling.request import Sampling
        from tpshard.programs.scheduling.request import Sequence as Answering

        answers, stops = [], []
        for request in requests:
            context, settings = request.args
            until = settings.get("until") or []
            stops.append([until] if isinstance(until, str) else list(until))
            most = int(settings.get("max_gen_toks", settings.get("max_new_tokens", MOST_TOKENS)))
            room = max(1, self.longest + 1 - most)
            prompt = self.tokenizer.encode(context, special=False)[-room:] or [self.begin]
            draws = bool(settings.get("do_sample"))
            sampling = Sampling(
                temperature=float(settings.get("temperature", 1.0)) if draws else 0.0,
                top_p=float(settings.get("top_p", 1.0)),
            )  # fmt: skip
            ends = frozenset(self.tokenizer.stop_tokens)
            answers.append(Answering(tuple(prompt), sampling, min(most, self.longest), stop_tokens=ends))

        def ended(answer: Answering) -> bool:
            text = self.tokenizer.decode(answer.answer)
            return any(stop in text for stop in stops[answers.index(answer)])

        run_to_end(self.service, answers, ended)
        texts = [self.tokenizer.decode(answer.answer) for answer in answers]
        return [min((text.split(stop)[0] for stop in ends), key=len, default=text) for text, ends in zip(texts, stops)]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens of a context and of its continuation."""
        bare = context.rstrip()
        context, continuation = bare, context[len(bare) :] + continuation
        if not context:
            return [self.begin], self.tokenizer.encode(continuation, special=False)
        before = self.tokenizer.encode(context, special=False)
        whole = self.tokenizer.encode(context + continuation, special=False)
        return whole[: len(before)], whole[len(before) :]

    def _windows(self, tokens: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """(context, predicted) of windows over a text: each as long as possible, every token predicted once."""
        size = self.longest - 1
        if tokens:
            yield [self.begin], tokens[:size]
        for start in range(size, len(tokens), size):
            predicted = tokens[start : start + size]
            end = start + len(predicted)
            yield tokens[max(0, end - self.longest) : start], predicted

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        from tpshard.programs.scheduling.request import Sampling
        from tpshard.programs.scheduling.request import Sequence as Answering

        if longer := [len(predicted) for _, predicted in pairs if len(predicted) >= self.longest]:
            raise ValueError(f"a continuation of {longer[0]} tokens is longer than the model's {self.longest}")
        answers = [
            Answering(
                tuple([*context, *predicted][-self.longest :]), Sampling(temperature=0.0, logprobs=1), 1,
                prompt_logprobs=True,
            )
            for context, predicted in pairs
        ]  # fmt: skip
        run_to_end(self.service, answers)
        results = []
        for (_, predicted), answer in zip(pairs, answers):
            scores = answer.prompt_scores[len(answer.prompt_scores) - len(predicted) :] if predicted else []
            greedy = all(score.token == score.top[0][0] for score in scores)
            results.append((sum(score.logprob for score in scores), greedy))
        return results


def run_to_end(
    service: Service, sequences: Sequence[Answering], ended: Callable[[Answering], bool] = lambda _: False
) -> None:
    """Runs sequences to their end, as many at once as the engine takes. Raises `Mistakes` (exit 9) where one fails.

    ended: whether an answer may stop here.
    """
    most = service.limits.most
    for start in range(0, len(sequences), most):
        together = sequences[start : start + most]
        events: queue.Queue[Any] = queue.Queue()
        service.submit(together, events.put)
        left = {answer.id for answer in together}
        while left:
            for event in events.get():
                if event.error is not None:
                    raise Mistakes.one(
                        f"the model failed on a text: {event.error}", exit=Exit.WORKER_LOST,
                        fix="the lines above name the cause",
                    )  # fmt: skip
                if event.finish is not None:
                    left.discard(event.sequence.id)
                elif event.sequence.id in left and ended(event.sequence):
                    left.discard(event.sequence.id)
                    service.cancel([event.sequence])


def require_lm_eval() -> None:
    """Raises `Mistakes` (exit 5) where lm-eval is not installed, or lacks a package."""
    try:
        from lm_eval import simple_evaluate  # noqa: F401
    except ImportError as error:
        message = "`--tasks` needs lm-eval, which cannot be imported"
        raise Mistakes.one(message, exit=Exit.MACHINE, why=str(error), fix="pip install lm-eval") from error


def results_of(recipe: Recipe, model: SourceModel, tasks: Sequence[str], limit: int | None) -> Mapping[str, Any]:
    """The metrics of each task, as lm-eval's `simple_evaluate` gives them. limit: examples of each task.

    Raises `Mistakes`: exit 2 for an unknown task, and as serving does.
    """
    import lm_eval
    from lm_eval.api.model import LM
    from tpshard.cli.serve import memory_need, open_tokenizer, start_service, stored_model

    class TpshardLM(EngineLM, LM):  # type: ignore[misc, unused-ignore]
        def __init__(self, *arguments: Any) -> None:
            LM.__init__(self)
            EngineLM.__init__(self, *arguments)

    need = memory_need(recipe, stored_model(recipe, model))
    tokenizer = open_tokenizer(recipe, model, need)
    begin = next(iter([*tokenizer.encode(""), *tokenizer.stop_tokens]), 0)
    service = start_service(recipe, model, need)
    try:
        found = lm_eval.simple_evaluate(
            model=TpshardLM(service, tokenizer, begin), tasks=list(tasks), limit=limit, bootstrap_iters=0
        )
    except (KeyError, ValueError) as error:
        fix = "`lm-eval ls tasks` lists them"
        raise Mistakes.one(f"lm-eval refuses {', '.join(tasks)}", exit=Exit.USAGE, why=str(error), fix=fix) from error
    finally:
        service.close()
    return {task: _numbers(metrics) for task, metrics in found["results"].items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def run_of(model: SourceModel) -> tuple[Location | None, int | None]:
    """The run's folder and the step of a checkpoint; (None, None) for a folder of another kind."""
    from tpshard.train.checkpoints.store_path import location

    folder = location(model.name)
    run, step = folder.absolute().parent.parent, folder.name.removeprefix("step-")
    return (run, int(step)) if (run / "metrics.jsonl").is_file() and step.isdigit() else (None, None)
