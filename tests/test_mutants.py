"""The table of mutants fits the code; `make mutants` runs it."""

from tests.run_mutants import read


def test_each_mutant_changes_one_line_and_names_tests_that_exist() -> None:
    assert [fault for mutant in read() if (fault := mutant.fault())] == []
