from mmtrain.commands.cli import main
from tests.run_page.test_runs import STEP, write_run


def test_a_page_is_written_into_the_run_or_where_one_says(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = (write_run(tmp_path / name, [{"step": 1} | STEP]) for name in ("one", "two"))
    assert main(["report", str(one)]) == 0
    assert f"{one}/report.html: 0.0" in capsys.readouterr().out
    assert "<title>one - mmtrain</title>" in (one / "report.html").read_text()
    assert main(["report", str(one), str(two)]) == 0
    assert "<title>one, two - mmtrain</title>" in (tmp_path / "report.html").read_text()
    assert main(["report", str(two), "--out", "page.html"]) == 0
    assert (tmp_path / "page.html").is_file() and not (two / "report.html").exists()


def test_bad_runs_are_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "run", [{"step": 1} | STEP])
    for words, message in (
        ([str(tmp_path / "nothing")], "is not a folder"),
        ([str(tmp_path)], "has no metrics.jsonl"),
        ([str(run), "--out", str(tmp_path / "no" / "x.html")], "cannot be written"),
    ):
        assert main(["report", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: report: ") and message in line
