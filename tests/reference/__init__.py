"""An independent reference of the published systems: when each commits, for a scripted case.

Small simulators, written from the papers' descriptions and the readings in ``docs/algorithms.md``,
not from the code they check; they import nothing of the project (a test asserts it). Each takes a
case (``cases.py``) and options, and returns its commits: pairs of a time in seconds and a number of
tokens.

- ``barrier_flowspec.py``: FlowSpec with the papers' barrier.
- ``free_flowspec.py``: FlowSpec with free-running stages.
- ``timesteps.py``: PipeDec.
- ``levels.py``: SpecPipe, and PipeDec's layers without timesteps.
- ``batches.py``: the naive pipeline and the static tree, whose rounds are judged as a whole.
- ``windows.py``: the chain.

Readings they share:

- Prefill is one pass of the prompt through all stages, and commits one token. Reading the prompt
  and accepted tokens costs the drafter nothing.
- A message takes the same time on every link; verdicts travel from D0 to each stage directly.
- A pass costs a stage the same for any number of rows, and nothing if no row is live. A running
  pass is never stopped: what it computed in vain is dropped at its end.
- At one moment, results come first (a growth's further draft pass begins with the result of the
  one before), then messages, then free stages and the free drafter begin new work. So a stage whose
  pass ends when a verdict arrives applies that verdict before its next pass, and a verdict comes
  before the first draft pass of a growth that could begin at the same moment.
- The output is cut at the number of tokens asked for; there is no end-of-sequence token.
"""
