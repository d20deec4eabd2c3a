"""The lab: plans, runs, one report. `python3 scripts/lab --help` lists the commands.

cli.py                the command line: commands, errors
run.py                the command `run`: a plan becomes runs
plan.py               parses plans
trainer.py            the trainer's options, and what a model costs
scheduler.py          starts, watches and stops runs
run_directory.py      reads run.json, log.jsonl and checkpoints; the only reader of run directories
schema.py             required types of the JSON files
option_history.py     options of a run that was resumed with others
runs.py               a run as numbers
save.py               the command `save`: runs in one file that is kept
saved.py              reads and writes such files
study.py              the runs of a comparison, and what prevents it
stats.py              intervals, tests, spikes
results.py            the numbers of a report
tables.py             its summary and tables
figures.py            its figures
report.py, page.*.j2  the command `report`: a page, Markdown and JSON
spike.py              the command `spike`: the cause of a loss spike, by replays
"""
