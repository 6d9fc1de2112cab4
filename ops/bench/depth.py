"""How many drafts in a row are right, by prompt set, temperature and drafter.

    python -m ops.bench.depth --target FOLDER --prompts DIR [--drafts ngram] [--hold-out 8]
                              [--tokens 64] [--dtype auto]

The texts are the target's own, decoded plainly, greedily and at temperature 1, after the last
``--hold-out`` prompts of each file in DIR, which ``ops.train.answers`` leaves out of a training. At
every position the drafter drafts a chain from the true text. *A round*: tokens that speculation
with three drafts would commit. Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from flowspec.core.run.sampling import Sampling
from flowspec.errors import FlowSpecError
from flowspec.model.drafters.sources import load_sources, open_models, taps_of
from flowspec.model.layers.block import LayerBlock
from flowspec.model.layers.placing import place
from flowspec.model.text.tokenizer import Tokenizer
from flowspec.model.weights.directory import ModelDirectory, all_tensors, fetch_weights
from flowspec.model.weights.precision import AUTO
from flowspec.proof import plain
from flowspec.proof.depth import acceptance_by_depth
from flowspec.proof.plain import PlainText
from flowspec.proof.prove import as_returned, load_blocks, load_tap_shares
from ops.bench.arguments import count, prompt_sets
from ops.parser import Parser
from ops.prompts import HELD_OUT, last_of_sets

DEPTH = 5
#: Drafts of a round.
ROUND = 3
SAMPLINGS = (Sampling(), Sampling(1.0, seed=1))


def texts_of(
    given: argparse.Namespace,
    target: ModelDirectory,
    tokenizer: Tokenizer,
    blocks: Sequence[LayerBlock],
    texts: Sequence[str],
) -> list[PlainText]:
    """Plain texts after the prompts ``texts`` that leave room for them."""
    prompts = [tokenizer.encode(text, raw=False) for text in texts]
    return [
        plain.decode(blocks, target, prompt, given.tokens, sampling)
        for prompt in prompts
        if len(prompt) + given.tokens <= target.context
        for sampling in SAMPLINGS
    ]


def report(given: argparse.Namespace) -> None:
    """Print the table, a row for each set, temperature and drafter, and one for all sets."""
    opened, _ = open_models(given.target, given.drafts[0])
    target = fetch_weights(given.target, all_tensors)
    placing = place(given.dtype, "cpu", opened.config)
    ranges = (range(target.layers),)
    blocks = load_blocks(target, ranges, placing)
    tokenizer = Tokenizer(target)
    sets = {}
    for name, asked in last_of_sets(given.prompts, given.hold_out).items():
        print(name, file=sys.stderr, flush=True)
        sets[name] = texts_of(given, target, tokenizer, blocks, asked)
    prompts = sum(map(len, sets.values())) // len(SAMPLINGS)
    print(f"{placing.precision}, {prompts} prompts, up to {given.tokens} tokens\n")
    steps = " | ".join(map(str, range(1, DEPTH + 1)))
    print(f"| prompts | T | drafter | {steps} in a row | a round |")
    print("|---" * (DEPTH + 4) + "|")
    for draft in given.drafts:
        drafter = load_sources(draft, target, dtype=AUTO)
        shares = load_tap_shares(blocks, ranges, taps_of(draft, target))
        returned = {
            name: [(text.sampling, as_returned(text, blocks, shares)) for text in texts]
            for name, texts in sets.items()
        }
        returned["all"] = [one for many in returned.values() for one in many]
        for name, texts in returned.items():
            for sampling in SAMPLINGS:
                own = [text for drawn, text in texts if drawn == sampling]
                found = acceptance_by_depth(drafter, own, DEPTH)
                shown = " | ".join(f"{share:.2f}" for share in found)
                made = 1 + sum(found[:ROUND])
                row = f"| {name} | {sampling.temperature:g} | `{draft}` | {shown} | {made:.2f} |"
                print(row, flush=True)


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--target", required=True, metavar="FOLDER")
    add("--prompts", type=prompt_sets, required=True, help="folder of .jsonl files")
    add("--drafts", type=lambda text: text.split(","), default="ngram", help="by commas (ngram)")
    add("--hold-out", type=count, default=HELD_OUT, help=f"last prompts of every file ({HELD_OUT})")
    add("--tokens", type=count, default=64, help="of every answer (64)")
    add("--dtype", default=AUTO, help="(auto)")
    try:
        report(parser.parse_args())
    except FlowSpecError as error:
        sys.exit(f"depth: {error}")


if __name__ == "__main__":
    main()
