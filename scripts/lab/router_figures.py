"""router_figures.py: the figure of the losses of the routers, of several runs by tokens and of one run by step."""

from . import stats
from .figures import binned, figure, over, trace, view

LOSSES = (("router_aux", "balance"), ("router_z", "z"))
NOTE = (
    "Without their weights --router-aux and --router-z; means over the layers with experts. The loss of balance is 1 if "
    "all experts have equally many tokens. The training loss does not include them."
)


def drawn(views):
    return figure("router_losses", "stability", "Losses of the routers", NOTE, views)


def comparison(study):
    views = []
    for key, name in LOSSES:
        traces = []
        for arm, label in study.arms.items():
            for lr in study.rates():
                runs = [run for run in study.runs_of(arm, lr) if any(stats.finite(r.get(key)) for r in run.train)]
                n = min((len(run.train) for run in runs), default=0)
                if not n:
                    continue
                x = [r["tokens"] for r in runs[0].train[:n]]
                y = [stats.mean_or_none([run.train[i].get(key) for run in runs]) for i in range(n)]
                traces.append(trace(arm, label, binned(x), binned(y), lr, who=over(runs), smooth=True))
        views.append(view(name, "tokens", f"{name} loss", traces))
    return drawn(views)


def of_run(run):
    x = binned([r["step"] for r in run.train])
    values = {name: binned([r.get(key) for r in run.train]) for key, name in LOSSES}
    return drawn(
        [view(name, "step", f"{name} loss", [trace(name, f"{name} loss", x, y, smooth=True)]) for name, y in values.items()]
    )
