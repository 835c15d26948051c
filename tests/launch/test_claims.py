import pytest

from mmtrain.errors import RankLostError
from mmtrain.launch.claims import Claim


def test_a_generation_belongs_to_the_first_membership_that_claims_it(tmp_path):
    first = Claim(tmp_path / "run", "job", 3, "aa")
    with pytest.raises(RankLostError, match="other nodes of this job have generation 3"):
        Claim(tmp_path / "run", "job", 3, "bb")
    Claim(tmp_path / "run", "job", 3, "aa").check()
    first.check()


def test_a_later_generation_ends_earlier_ones(tmp_path):
    first = Claim(tmp_path, "job", 3, "aa")
    later = Claim(tmp_path, "job", 10, "bb")
    later.check()
    with pytest.raises(RankLostError, match="cut off in generation 3, ask again"):
        first.check()
    with pytest.raises(RankLostError, match="have generation 10"):
        Claim(tmp_path, "job", 9, "aa")
    later.check()


def test_another_job_in_the_folder_begins_anew(tmp_path):
    Claim(tmp_path, "job", 7, "aa")
    Claim(tmp_path, "other", 1, "aa").check()
    assert len(list(tmp_path.iterdir())) == 1
