"""Uploads an exported folder to the hub, or to the endpoint that `HF_ENDPOINT` names, by `huggingface_hub`."""

import os
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from mmtrain.errors import ConfigError


def check_push(repo: str) -> None:
    """Refuses an upload that cannot succeed, before anything is written.

    Args: repo: `owner/name`. Raises: ConfigError: no such name, no token, or an offline machine.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        reason = str(error).split(". ")[0]
        raise ConfigError(f"--push {repo[:200]}: {reason}; write it as owner/name") from None
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"--push {repo}: HF_HUB_OFFLINE is set, so nothing may be uploaded; unset it")
    if get_token() is None:
        raise ConfigError(f"--push {repo}: no token of the hub; set HF_TOKEN, or log in with `hf auth login`")


def push(folder: Path, repo: str, message: str) -> str:
    """The address of the commit with all files of a folder; a new repository is private.

    Args: message: of the commit. Raises: ConfigError: the hub refuses or does not answer; the folder is complete.
    """
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="mmtrain")
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"--push {repo}: {type(error).__name__}: {reason}; {folder} is complete, upload it again with "
            f"`hf upload {repo} {folder}`"
        ) from None
    return str(commit.commit_url)
