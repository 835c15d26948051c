"""The table of metrics says the truth about the page, and has each name once."""

from mmtrain.run_page.metric_table import BY_NAME, METRICS
from mmtrain.run_page.numbers import numbers
from mmtrain.run_page.page_charts import charts
from mmtrain.run_page.runs import RunContents


class Line(dict):
    """A line of metrics.jsonl that notes which keys are read."""

    def __init__(self, values, read):
        super().__init__(values)
        self.read = read

    def get(self, key, default=None):
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)


def test_the_page_reads_what_the_table_says():
    keys = {metric.name.format("M"): metric for metric in METRICS if metric.in_file}
    read = set()
    for without in ((), ("mfu",)):
        line = Line({key: 0.5 for key in keys if key not in without} | {"step": 1}, read)
        run = RunContents(name="r", steps=(line,), validations=(), config_text="", starts=(), timelines=(), answers={})
        charts([run])
        numbers(run)
    assert {key for key, metric in keys.items() if metric.on_page} == read & set(keys)


def test_names_and_tags_are_there_once():
    assert len(BY_NAME) == len(METRICS)
    tags = [metric.tag for metric in METRICS if metric.tag]
    assert len(set(tags)) == len(tags)
    assert {metric.over_run for metric in METRICS} == {"", "sum", "steps"}
