"""Keys of older versions: refused in a person's file, read from a run's own."""

import re

import pytest

from mmtrain.config.config import find_file, load, value_of
from mmtrain.config.moved_keys import GONE, MOVED
from mmtrain.errors import ConfigError

TOML = find_file("debug_text.toml").read_text()


def test_every_new_name_is_a_key_and_no_old_one_is():
    config = load("debug_text.toml")
    for old, new in MOVED.items():
        value_of(config, new)
        with pytest.raises(AttributeError):
            value_of(config, old)


@pytest.mark.parametrize("old", MOVED)
def test_a_persons_file_is_refused_with_the_new_name(tmp_path, old):
    for overrides in ([f"--{old}=1"], []):
        path = tmp_path / "mine.toml"
        path.write_text(TOML if overrides else TOML.replace("[planner]\n", f"[planner]\n{old.partition('.')[2]} = 1\n"))
        with pytest.raises(ConfigError, match=rf"unknown key {re.escape(old)}; it is {re.escape(MOVED[old])} now$"):
            load(path, overrides)


@pytest.mark.parametrize("gone", GONE)
def test_a_key_that_is_gone_is_refused_in_a_persons_file_and_passed_over_in_what_a_run_wrote(tmp_path, gone):
    section, name = gone.rsplit(".", 1)
    text = (
        TOML + f"\n[{section}]\n{name} = 1\n"
        if f"[{section}]" not in TOML
        else TOML.replace(f"[{section}]\n", f"[{section}]\n{name} = 1\n")
    )
    for file in ("mine.toml", "config.toml"):
        (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=rf"unknown key {re.escape(gone)}; leave it out: "):
        load(tmp_path / "mine.toml")
    assert load(tmp_path / "config.toml").planner == load("debug_text.toml").planner


def test_what_an_older_run_wrote_is_read_as_what_it_says(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(TOML.replace("[planner]\n", "[planner]\nbudget_s = 7.0\np2p_latency_s = 0.5\n"))
    planner = load(path, ["--planner.search.patience_s=5"]).planner
    assert (planner.search.budget_s, planner.search.patience_s, planner.device.p2p_latency_s) == (7.0, 5.0, 0.5)
    with pytest.raises(ConfigError, match=r"unknown key planner\.budget_s; it is planner\.search\.budget_s now$"):
        load(path, ["--planner.budget_s=5"])


def test_values_that_were_removed_are_read_from_what_a_run_wrote_and_refused_in_a_file(tmp_path):
    text = TOML.replace("[planner]\n", '[planner]\nstrategy = "dfs"\nplacement = "replicated"\n')
    text += '\n[assignment]\npolicy = "disttrain"\n'
    (tmp_path / "config.toml").write_text(text)
    job = load(tmp_path / "config.toml")
    read = job.planner.search.strategy, job.planner.placement, job.assignment.policy
    assert read == ("anneal", "spread", "none")
    (tmp_path / "mine.toml").write_text(TOML + '\n[assignment]\npolicy = "disttrain"\n')
    with pytest.raises(ConfigError, match=r'assignment\.policy = .disttrain.; choose one of "none", "balanced"'):
        load(tmp_path / "mine.toml")


def test_a_new_key_counts_more_than_its_old_name(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(TOML.replace("[planner]\n", "[planner]\nbudget_evaluations = 7\n"))
    assert load(path).planner.search.budget_evaluations == 200
