"""One run at the draft worker: its text, and the token tree that drafts the text's continuation.

The root is a token that the target has chosen but not yet computed. Segments of the selected tree T
(``core.tree.tree``) are in flight or waiting; answers name nodes by id. As soon as strategy and
pacing allow, answers are judged: accepted nodes become context, the target's next choice becomes
the root, and everything not below it is pruned. If T lacks that choice, a new round begins from a
new root.

The text so far is a chain of nodes 0 .. L-1, and node L-1 is the first root. It is the prompt, or
the prompt and the tokens that an earlier run of the job has committed.

A turn follows each answer, each pass of the drafter and each join. Every turn takes the same steps:
judge, commit, grow, send. A growth that needs the drafter ends the turn and is continued in the
turn after the drafter's pass. What a turn sends is written when it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowspec.core.drafting.calibration import Calibrations
from flowspec.core.drafting.drafting import DRAFT_TREE_ROWS, Drafting, DraftingOptions
from flowspec.core.prefixes.kept_prefixes import DrafterKind, KeptPrefixes
from flowspec.core.prefixes.prompt_rows import PromptRows
from flowspec.core.protocol.addresses import DRAFT, Address
from flowspec.core.protocol.machine import Allocate
from flowspec.core.protocol.messages import (
    Answer,
    Close,
    Open,
    Prune,
    Returns,
    Synced,
)
from flowspec.core.protocol.work import Draft, DraftDone, Kept
from flowspec.core.run.history import History
from flowspec.core.run.key import RunKey
from flowspec.core.run.limits import Limits
from flowspec.core.run.logprobs import asked_pairs
from flowspec.core.run.share import RunShare
from flowspec.core.run.spec import JobSpec
from flowspec.core.session.lifecycle import Event, Lifecycle, State
from flowspec.core.session.model_chain import ModelChain
from flowspec.core.session.outbox import Outbox
from flowspec.core.session.pacing import TurnCause
from flowspec.core.session.pipeline_feed import PipelineFeed
from flowspec.core.session.round_trip import RoundTrip
from flowspec.core.session.stats import Tally
from flowspec.core.session.strategy import Occasion, Strategy
from flowspec.core.session.text import RunText
from flowspec.core.tree.accept import Verdict, follow
from flowspec.core.tree.segments import prefill_chunks
from flowspec.core.tree.tree import Node, Tree


@dataclass(slots=True)
class AnswerDeadline:
    """How long a run waits for an answer: ``seconds`` from ``since``, on the driver's clock."""

    since: float
    seconds: float

    @property
    def until(self) -> float:
        return self.since + self.seconds


def answer_budget(prompt: int, max_new_tokens: int, limits: Limits) -> int:
    """Most tokens of the answer to a prompt of ``prompt`` tokens."""
    return min(max_new_tokens, limits.context - prompt)


def rows_of_run(prompt: int, max_new_tokens: int, limits: Limits) -> int:
    """KV rows that a stage allocates for a run: its text's and its tree's."""
    return prompt + answer_budget(prompt, max_new_tokens, limits) + limits.tree_rows


class Session:
    """A run from its prompt to its end; what it sends is collected in ``outbox``.

    ``committed``: output tokens that earlier runs of the job have committed, by commit. ``tally``:
    new. ``prefixes``: what the pipeline keeps of runs; None: nothing for this one, nor of it.
    ``generations``: of the workers that it is assigned to.
    """

    def __init__(
        self,
        run: RunKey,
        spec: JobSpec,
        prompt: Sequence[int],
        limits: Limits,
        strategy: Strategy,
        lifecycle: Lifecycle,
        tally: Tally,
        history: History,
        committed: tuple[tuple[int, ...], ...] = (),
        prefixes: KeptPrefixes | None = None,
        generations: tuple[int, ...] = (),
    ) -> None:
        self.run = run
        self.spec = spec
        self.strategy = strategy
        self.lifecycle = lifecycle
        self.tally = tally
        budget = answer_budget(len(prompt), spec.max_new_tokens, limits)
        output = [token for group in committed for token in group]
        self.text = RunText(prompt, budget, output)
        # With log-probabilities a commit's text is written token by token.
        scored = spec.logprobs is not None
        self._committed = tuple((token,) for token in output) if scored else committed
        prefix = self.text.prefix
        self.outbox = Outbox(run, limits.stages)
        drafters = strategy.eligible_drafters(limits.drafters)
        self.returns = Returns(
            top=max(strategy.top, asked_pairs(spec.logprobs)),
            hidden=any(drafters) and strategy.draft_width > 0,
        )
        self._limits = limits
        self._generations = generations
        # A chain's models have no kept rows, and compute the whole text.
        chained = strategy.uses_middles and limits.middles > 0
        kinds = None if chained else self._drafter_kinds(drafters)
        self.prompt_rows = PromptRows(run, spec.cache_salt, prefix, prefixes, kinds)
        sampled = spec.sampling.temperature > 0
        strategy.use_history(history, sampled=sampled, drafters=len(drafters))
        options = self._drafting_options(drafters, limits, history, sampled=sampled)
        self.drafting = Drafting(run, prefix, options, self.prompt_rows.drafted)
        self.tree = Tree(len(prefix) - 1)
        self.finish_reason = ""
        self.answer_deadline = AnswerDeadline(tally.started_at, limits.stall_seconds)
        self._chain = ModelChain(
            run,
            len(prefix),
            limits.middles if strategy.uses_middles else 0,
            limits.tree_rows,
            self.outbox,
        )
        self._feed = PipelineFeed(
            strategy, lifecycle, limits, tally, self.tree, self.drafting, self._chain, self.outbox
        )
        self._now = tally.started_at

    def _drafter_kinds(self, drafters: tuple[bool, ...]) -> list[DrafterKind]:
        """What each drafter that the run uses can begin with."""
        levels = self._limits.levels or (0,) * len(drafters)
        used = zip(drafters, levels, strict=False) if self.strategy.draft_width else ()
        return [DrafterKind(refreshed, count > 0) for refreshed, count in used]

    def _drafting_options(
        self, drafters: tuple[bool, ...], limits: Limits, history: History, *, sampled: bool
    ) -> DraftingOptions:
        strategy = self.strategy
        coupled = strategy.coupled and sampled
        model = history.get(Calibrations).model(coupled=coupled, sampled=sampled)
        return DraftingOptions(
            width=strategy.draft_width,
            coupled=coupled,
            refreshed=drafters,
            levels=limits.levels[: len(drafters)],
            redrafts=strategy.redrafts,
            calibration=model,
            calibrates_all=strategy.calibrated,
        )

    # ---- what the machine asks -------------------------------------------------------------------

    @property
    def decoding(self) -> bool:
        """Whether the target has returned its first token and the text is not complete."""
        return self.lifecycle.is_decoding

    @property
    def in_flight(self) -> int:
        """Segments sent and neither answered nor emptied by a prune."""
        return self._feed.in_flight

    @property
    def workers(self) -> int:
        """The number of workers that hold rows of this run and report on it."""
        return self._limits.stages + len(self._chain.addresses)

    @property
    def drafter_allocation(self) -> Allocate:
        """The rows to allocate in the drafter's KV cache."""
        capacity = len(self.text.prompt) + self.text.budget + DRAFT_TREE_ROWS
        found = Allocate(
            self.run,
            capacity,
            self.spec.sampling,
            self.returns,
            prompt=self.text.prompt,
            committed=self._committed,
        )
        source, held = self.prompt_rows.source, self.prompt_rows.drafted
        if source is None or not any(held):
            return found
        return replace(found, source=source.run, held=held)

    # ---- beginning and end -----------------------------------------------------------------------

    def start(self) -> None:
        """Open the run at every worker and send the text that stages do not have."""
        prefix = self.text.prefix
        root = self.tree.plant(prefix[-1], len(prefix) - 1, len(prefix) - 2)
        self.tree.mark_sent([root])
        capacity = rows_of_run(len(self.text.prompt), self.spec.max_new_tokens, self._limits)
        opening = Open(
            self.run,
            len(prefix),
            capacity,
            self.spec.sampling,
            self.returns,
            self.spec.record,
            self.prompt_rows.source,
            self._generations,
        )
        self.outbox.tell(self.outbox.stages, opening)
        self._prefill()
        for model in self._chain.addresses:
            plain = replace(opening, returns=Returns(), prefix=None)
            self.outbox.send(model, plain)
            self.outbox.prefill(model, prefix)

    def _prefill(self) -> None:
        """Send stage 1 the text from the first row on that the stages do not have."""
        prefix = self.text.prefix
        reused = self.tally.cached = self.prompt_rows.reused
        self.outbox.prefill(self.outbox.stages[0], prefix, reused)
        # Without hidden rows only the last chunk is answered, so the first wait covers them all.
        chunks = len(prefill_chunks(len(prefix), reused))
        self.answer_deadline.seconds = self._limits.stall_seconds * chunks

    def lose_prefix(self, now: float) -> None:
        """A stage lacks the rows that the run was to begin with: send the whole text.

        Nothing was answered yet, as every row passes that stage; drafters keep what they hold.
        """
        if self.prompt_rows.lose():
            self.answer_deadline.since = now
            self._prefill()

    def close(self) -> None:
        """Send Close to every worker that holds rows of the run; nothing is kept."""
        self.outbox.tell((*self.outbox.stages, *self._chain.addresses), Close(self.run))

    def _close_complete(self) -> None:
        """Send Close to every worker, and have the stages keep the text's rows."""
        text = self.text.prefix[: self.text.context]
        closing = self.prompt_rows.close(text, self.drafting.computed)
        self.outbox.tell(self.outbox.stages, closing)
        self.outbox.tell(self._chain.addresses, Close(self.run))

    # ---- sharing ---------------------------------------------------------------------------------

    def will_share(self, *, drafts: bool) -> bool:
        """Whether more rows of the prompt are soon there for others, drafters' if it ``drafts``."""
        if not self.prompt_rows.are_shared:
            return False
        if self.lifecycle.state is State.PREFILL:
            return True
        return drafts and self.decoding and self.drafting.catches_up(self.prompt_rows.rows)

    def _share_prompt(self) -> None:
        """Have the stages, which have computed the prompt, keep its rows for others from now on."""
        retain = self.prompt_rows.retain(len(self.drafting.computed))
        if retain is not None:
            self.outbox.tell(self.outbox.stages, retain)

    def take_drafts_to_share(self) -> tuple[Kept, ...]:
        """Each drafter's rows to keep, once another one has computed the prompt; else empty."""
        if not self.decoding or not self.prompt_rows.drafts_are_new(self.drafting.computed):
            return ()
        caches = self.drafting.share(self.prompt_rows.rows)
        self.prompt_rows.share_drafted([cache.rows for cache in caches])
        return caches

    # ---- take ------------------------------------------------------------------------------------

    def take_answer(self, sender: Address, answer: Answer, now: float) -> None:
        """Take the choices of the target, or of a middle model, for one segment."""
        self._now = self.answer_deadline.since = now
        if self._chain.includes(sender):
            self._take_middle_answer(sender.number, answer)
        else:
            self._take_target_answer(answer)

    def _take_target_answer(self, answer: Answer) -> None:
        self.answer_deadline.seconds = self._limits.stall_seconds
        # If hidden rows are wanted, the prompt's earlier chunks are answered, too.
        completes_prefill = not self.decoding and self.tree.root in answer.ids
        segment = self._feed.window.land(answer, self._now)
        for at, (node, token) in enumerate(zip(answer.ids, answer.tokens, strict=True)):
            self.tree.record_choice(node, token, answer.top[at] if answer.top else ())
        trip = None
        if segment is not None:
            trip = segment.round_trip(self._now)
        elif completes_prefill:
            prefill_seconds = self._now - self.tally.started_at
            sent = len(self.text.prefix) - self.prompt_rows.reused
            trip = RoundTrip(sent, prefill_seconds, alone=True)
        self.strategy.observe_answer(self._feed.view, answer, trip)
        self._turn(TurnCause.ANSWER, of_segment=segment is not None)

    def _take_middle_answer(self, model: int, answer: Answer) -> None:
        self._chain.land(model, answer, self._feed.view)
        self.strategy.middles_advanced(self._feed.view, self._chain.tips)
        self._feed.retry_idle()
        self._turn(TurnCause.MIDDLE_ANSWER)

    def take_join(self, now: float) -> None:
        """Take a join: all tasks that the pacing policy waited for are complete."""
        self._now = now
        self._turn(TurnCause.JOIN)

    def start_draft(self) -> Draft | None:
        """The drafter's next pass; None: nothing is pending."""
        work = self.drafting.next_work(self.tree)
        self.tally.draft_passes += work is not None
        return work

    def take_draft(self, result: DraftDone, seconds: float, now: float) -> None:
        """Take the result of the drafter's pass, which took ``seconds``.

        It has no effect if the text was completed meanwhile.
        """
        self._now = self.answer_deadline.since = now  # a slow drafter is not a lost message
        self.drafting.done(result, self.tree, seconds)
        self._turn(TurnCause.DRAFTED)

    def take_share(self, share: RunShare) -> None:
        """Keep to ``share`` from the next turn on."""
        self._feed.share = share
        self.tally.note_share(share)

    # ---- one turn --------------------------------------------------------------------------------

    def _turn(self, cause: TurnCause, *, of_segment: bool = False) -> None:
        """Judge the answers, commit the verdict, grow the tree, send what may leave."""
        pacing = self.strategy.pacing
        verdict = None
        if pacing.may_judge(cause, decoding=self.decoding):
            completed = pacing.begin_judging(cause, of_segment=of_segment)
            verdict = self._judge()
            if verdict is not None:
                self._commit(verdict, completed)
            elif completed:
                self.outbox.complete(completed)
                pacing.follow_empty_verdict()
        if self.lifecycle.state is State.CLOSING:
            return
        if verdict is not None:
            self._regrow(verdict)
        pacing.begin_turn(cause, decoding=self.decoding)
        self._feed.grow_and_send(self._now)
        self._chain.feed(self.strategy, self._feed.view)
        end = pacing.end_turn(self._feed.window.loaded, self._feed.needs_drafter)
        self.outbox.complete(end.completes)
        if end.join is not None:
            message = Synced(self.run, end.join.task)
            self.outbox.send_after(DRAFT, message, end.join.task, end.join.after)

    # ---- judge -----------------------------------------------------------------------------------

    def _judge(self) -> Verdict | None:
        """The verdict on the answers received; None: nothing follows, or the strategy waits."""
        if not self.strategy.may_judge(self._feed.view):
            return None
        return follow(
            self.tree,
            budget=self.text.left,
            eos=self._limits.eos,
            accepts_unsent=self.strategy.accepts_unsent,
            decide=self._decide,
        )

    def _decide(self, node: Node, token: int) -> int:
        return self.strategy.decide(self.tree, node, token)

    # ---- commit ----------------------------------------------------------------------------------

    def _commit(self, verdict: Verdict, completed: tuple[str, ...]) -> None:
        """Append the verdict's tokens to the text, move the root, prune everywhere.

        A verdict that completes the text closes the run.
        """
        self.tally.count(len(verdict.tokens), verdict.hits, self._now)
        self.drafting.observe(self.tree, verdict)
        accepted = [self.tree[node] for node in verdict.accepted]
        begins = not self.decoding
        context = self.text.context
        emitted = len(self.text.output)
        self.text.output += verdict.tokens
        self._feed.retry_idle()
        if verdict.finish:
            root = self._end_text(verdict)
        elif verdict.successor is not None:
            root = self._advance(verdict.successor)
        else:
            root = self._plant(verdict)
            completed += self.strategy.pacing.start_round(
                self.tally.rounds, self.strategy.max_in_flight
            )
        retained = tuple(sorted(self.tree.nodes))
        prune = Prune(self.run, context, verdict.accepted, root, retained)
        top = [node.top for node in accepted]
        self.outbox.commit(prune, emitted, verdict, completed, top, self.spec.logprobs)
        self.drafting.commit(accepted, root, self.tree)
        if verdict.finish:
            self._close_complete()
            return
        if begins:
            self._share_prompt()
        self._chain.commit(accepted, self.tree)
        self.strategy.middles_advanced(self._feed.view, self._chain.tips)

    def _regrow(self, verdict: Verdict) -> None:
        """Begin the growth that follows ``verdict``; enqueue the segments of the one before it."""
        if verdict.successor is not None:
            self._feed.enqueue(self.drafting.collect_overtaken(self.tree))
            self._feed.grow(Occasion.VERDICT)
        else:
            self._feed.grow(Occasion.ROUND)

    def _end_text(self, verdict: Verdict) -> int:
        """Complete the text; return an id that no node has as the root: no row stays live."""
        self.finish_reason = verdict.finish
        self.lifecycle.fire(Event.COMPLETE)
        self.tree.clear()
        self._feed.window.clear()
        return self.tree.next_id

    def _advance(self, successor: int) -> int:
        """The target's choice is in T: it becomes the root, and what lies below it lives."""
        self.tree.advance(successor)
        self._feed.window.prune(self.tree, keep_emptied=self.strategy.pacing.keeps_emptied)
        return successor

    def _plant(self, verdict: Verdict) -> int:
        """The target's choice is not in T: a new round begins from it."""
        if not self.decoding:
            self.lifecycle.fire(Event.FIRST_TOKEN)
        self.tally.rounds += 1
        self._feed.window.clear()
        return self.tree.plant(verdict.tokens[-1], self.text.context, verdict.accepted[-1])
