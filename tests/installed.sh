#!/usr/bin/env bash
# What an installed dllm_jax must do, far from the repository: tests/installed.sh VENV, as `make package` runs it.
set -euo pipefail
bin="$(cd "$1/bin" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"
export DLLM_JAX_HOME="$work/home" JAX_PLATFORMS=cpu PYTHONSAFEPATH=1

packages="$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
for file in licenses/LICENSE licenses/NOTICE; do test -f "$packages"/dllm_jax-*.dist-info/$file; done
"$bin/dllm" --version
for command in convert sample serve train eval; do
    if [ $command != serve ]; then "$bin/dllm" $command --help > /dev/null; fi    # which needs the extra
done
"$bin/dllm" convert embedded word-problems > /dev/null
question=$'Q: Sam has 26 nuts. Sam buys 10. Sam keeps one of 3 equal parts.\nA: '
test "$("$bin/dllm" sample "$question" --model word-problems --rule topk)" = "26+10=36. 36/3=12. #### 12"
"$bin/dllm" sample "$question" --model word-problems --gen-length 16 --save-view view.html > /dev/null 2>&1
grep -q 'class="dllm-view"' view.html
if "$bin/dllm" sample "$question" --model word-problems --save-view view.gif 2> said; then exit 1; fi
grep -q 'dllm_jax\[view\]' said
"$bin/dllm" eval run --model word-problems --task word-problems --sampler topk:k=2 --n 20 | grep accuracy
"$bin/dllm" eval presets > /dev/null

printf '{"prompt": "Q: %s\\nA: ", "answer": "%s"}\n' one 1 two 2 three 3 > pairs.jsonl
cat > mine.toml << 'TOML'
out = "run"
steps = 2
[model]
init = "word-problems"
[data]
source = "jsonl"
options = {path = "pairs.jsonl"}
length = 32
[optimizer]
batch = 2
warmup = 1
TOML
"$bin/dllm" train masked-diffusion --config mine.toml --no-progress | grep "written to"
"$bin/dllm" convert export --checkpoint run/model --out hub > /dev/null
test -f hub/model.safetensors

if "$bin/dllm" serve --model word-problems 2> said; then exit 1; fi    # one sentence that says what to install
grep -q 'dllm_jax\[serve\]' said
echo "the installed package works"
