"""The benchmark tasks that lm-evaluation-harness lacks: `dllm_*`, as YAML with the functions that they name.

Each says in `metadata` where its settings come from, and whether the wording is the published one ("published") or ours
after a description ("ours"). `docs/code-tasks.md` says how they run on files of one's own.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
