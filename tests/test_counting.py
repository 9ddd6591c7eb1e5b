"""Counts of the papers on answers made by hand, and on a run's own."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import dllm_jax
import evals
from convert import embedded
from dllm_jax import DllmError
from evals import __main__ as cli
from evals.extraction import tokens_before_stop
from evals.token_counts import COUNTS, CountedAnswer, complete_at, count

EOS, EOT = 0, 1
# Prompt of three tokens, one of them an end token; eight positions, of which the first four are the answer, then the
# end of a turn, something behind it, and two that nobody wrote.
ONE = CountedAnswer(
    prompt_ids=[5, EOS, 6],
    canvas_ids=[10, 11, 12, 13, EOT, 14, EOS, EOS],
    tokens=4,
    cut_text="ab cd<eot>e",
    plain_text="ab cde",
    nfe=2,
    committed=6,
    seconds=0.5,
    complete_at=1,
)
OTHER = CountedAnswer(
    prompt_ids=[5],
    canvas_ids=[10, EOS, 20, 21, 22, 23, 24, 25],
    tokens=1,
    cut_text="a<eos>fghijk",
    plain_text="afghijk",
    nfe=4,
    committed=8,
    seconds=2.0,
    complete_at=4,
)


def encode(text):
    """One token for every letter and for every special token, none for spaces."""
    text = text.replace("<eot>", chr(EOT)).replace("<eos>", chr(EOS)).replace(" ", "")
    return [ord(letter) for letter in text]


def counted(kind, answers=(ONE, OTHER), seconds=4.0):
    found = vars(count(kind, list(answers), eos_id=EOS, encode=encode, seconds=seconds))
    assert found.pop("count") == kind and found.pop("distorts") == COUNTS[kind].distorts
    return {name: value for name, value in found.items() if value is not None}


def test_fast_dllm_encodes_the_cut_text_again_with_what_is_behind_an_end_of_turn():
    # "abcd", the end of the turn and "e" are 6; "a", no end of sequence, and "fghijk" are 7
    assert counted("fast-dllm-llada") == {"n": 2, "tokens": 6.5, "total_nfe": 6, "tokens_per_second": 13 / 4}


def test_fast_dllm_counts_the_prompt_of_humaneval():
    # 2 + 6 and 1 + 7
    assert counted("fast-dllm-llada-humaneval") == {"n": 2, "tokens": 8, "total_nfe": 6, "tokens_per_second": 4}


@pytest.mark.parametrize("kind", ["fast-dllm-dream", "d2f-dream"])
def test_dream_s_classes_count_the_canvas_and_no_forwards(kind):
    assert counted(kind) == {"n": 2, "tokens": (6 + 7) / 2, "tokens_per_second": 13 / 4}


def test_d2f_drops_special_tokens_before_it_encodes_again():
    assert counted("d2f-llada") == {"n": 2, "tokens": (5 + 7) / 2, "tokens_per_second": 12 / 4}


def test_ni_counts_every_position():
    assert counted("ni") == {"n": 2, "tokens": 8, "nfe": 3, "tokens_per_second": 16 / 4}


def test_apd_counts_what_was_accepted_and_takes_means_of_ratios():
    found = counted("apd")
    speeds = 6 / 0.5, 8 / 2.0
    assert found["tokens"] == 7 and found["nfe"] == 3 and "tokens_per_second" not in found
    assert found["mean_tokens_per_second"] == pytest.approx(sum(speeds) / 2)
    assert found["mean_tokens_per_second_stderr"] == pytest.approx(4 / 2**0.5)  # half the difference, of two
    # up to the first end of the sequence: an end of a turn is none
    assert counted("apd-dllm")["tokens"] == (6 + 1) / 2


def test_dinfer_takes_the_prompt_s_length_from_all_that_is_no_end():
    # 8 - 3, as the prompt's end token is not counted but taken away, and 8 - 1
    assert counted("dinfer") == {
        "n": 2,
        "tokens": 6,
        "nfe": 3,
        "tokens_per_forward": 12 / 6,
        "tokens_per_second": 12 / 2.5,
        "mean_tokens_per_forward": pytest.approx((5 / 2 + 7 / 4) / 2),
        "mean_tokens_per_second": pytest.approx((5 / 0.5 + 7 / 2) / 2),
    }


def test_dinfer_s_paper_counts_before_the_first_end_and_takes_means_over_sequences():
    # 6, as an end of a turn is none, and 1
    speeds = 6 / 0.5, 1 / 2.0
    assert counted("dinfer-paper") == {
        "n": 2,
        "tokens": 3.5,
        "nfe": 3,
        "mean_tokens_per_forward": pytest.approx((6 / 2 + 1 / 4) / 2),
        "mean_tokens_per_second": pytest.approx(sum(speeds) / 2),
        "mean_tokens_per_second_stderr": pytest.approx((speeds[0] - speeds[1]) / 2 / 2**0.5),
    }


def test_d3llm_leaves_the_first_ten_out():
    found = counted("d3llm", [OTHER] * 10 + [ONE] * 3)
    assert found == {
        "n": 3,
        "tokens": 6,
        "total_nfe": 6,
        "tokens_per_forward": 3,
        "tokens_per_second": pytest.approx(6 / 0.5),
    }
    with pytest.raises(DllmError, match="d3llm leaves the first 10"):
        counted("d3llm", [ONE] * 10)


def test_speeds_of_single_answers_need_their_own_seconds():
    together = [CountedAnswer(**{**vars(answer), "seconds": None}) for answer in (ONE, OTHER)]
    assert set(counted("apd", together)) == {"n", "tokens", "nfe"}
    assert set(counted("dinfer", together)) == {"n", "tokens", "nfe", "tokens_per_forward", "mean_tokens_per_forward"}
    assert counted("ni", together) == counted("ni")


def test_eb_has_two_numbers_of_forwards_of_one_run():
    assert counted("eb") == {"n": 2, "tokens": 2.5, "nfe": 3, "nfe_until": 2.5}
    unknown = [CountedAnswer(**{**vars(ONE), "complete_at": None}), OTHER]
    assert counted("eb", unknown) == {"n": 2, "tokens": 2.5, "nfe": 3}


@pytest.mark.parametrize("blocks", ["", ",block_length=8"])
def test_forwards_until_the_end_are_those_of_a_run_that_ends_there(blocks, tmp_path):
    model = dllm_jax.load(embedded.install("word-problems", tmp_path / "model"))
    run = {"n": 8, "batch_size": 8, "progress": False, "counts": ["eb"]}
    whole = evals.run(model, "word-problems", f"topk:k=2,ignore_eos=true{blocks}", **run)
    early = evals.run(model, "word-problems", f"topk:k=2{blocks}", **run)
    assert whole.compat_count["eb"]["nfe"] == whole.nfe == 16
    assert whole.compat_count["eb"]["nfe_until"] == early.compat_count["eb"]["nfe_until"] == early.nfe
    assert not blocks or early.nfe < 16  # in one block the answer's digits come last


def test_an_answer_is_complete_with_the_whole_stop_string(llada_tiny):
    ids = llada_tiny.tokenizer("a=4;;b", add_special_tokens=False)["input_ids"]
    assert len(ids) == 6
    result = SimpleNamespace(tokens=np.array([ids]), decoded_at=np.array([[0, 1, -1, 2, 4, 7]]))
    assert complete_at(result, 3, llada_tiny, [";;"]) == 5  # forward 4 wrote the second semicolon
    assert complete_at(result, 6, llada_tiny, ["!"]) == complete_at(result, 6, llada_tiny, []) == 8
    assert complete_at(result, 1, llada_tiny, ["="]) == 2


def test_every_count_says_where_it_was_read_and_what_it_distorts():
    assert all("arXiv" in how.source and how.distorts for how in COUNTS.values())
    with pytest.raises(DllmError, match="'ours'"):
        counted("ours")


def test_tokens_before_a_stop_string():
    pieces = [b"a\n", b"\nb", b"c", "é".encode()[:1], "é".encode()[1:]]
    assert tokens_before_stop(pieces, []) == tokens_before_stop(pieces, ["x"]) == 5
    assert tokens_before_stop(pieces, ["\n\n"]) == 1  # the first token begins before it
    assert tokens_before_stop(pieces, ["\n\n", "a"]) == 0 and tokens_before_stop(pieces, ["c"]) == 2
    assert tokens_before_stop(pieces, ["é"]) == 3


def test_a_run_tells_them_beside_its_own_numbers(llada_tiny, tmp_path, capsys):
    """Answers of the tiny model: the whole canvas is written, and every character is a token."""
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "target": "4"}) + "\n" for n in range(12)))
    task = f"text:file={file},gen_length=8"
    run = {"n": 12, "batch_size": 12, "progress": False}
    plain = evals.run(llada_tiny, task, "topk:k=2", **run)
    report = evals.run(llada_tiny, task, "topk:k=2", **run, counts=["fast-dllm-llada", "ni", "d3llm"])
    assert plain.compat_count == {} and report.rows == plain.rows
    assert (report.tokens, report.nfe, report.tokens_per_forward) == (plain.tokens, plain.nfe, plain.tokens_per_forward)
    found = report.compat_count
    assert found["ni"]["tokens"] == 8 and found["ni"]["nfe"] == pytest.approx(report.nfe)
    assert found["ni"]["tokens_per_second"] == pytest.approx(12 * 8 / report.seconds)
    assert found["fast-dllm-llada"]["total_nfe"] == sum(row.nfe for row in report.rows)
    assert found["fast-dllm-llada"]["tokens"] >= report.tokens
    late = report.rows[10:]
    assert found["d3llm"]["n"] == 2 and found["d3llm"]["total_nfe"] == sum(row.nfe for row in late)
    assert "tokens_per_second" not in found["d3llm"]  # rows ran together

    arguments = ["run", "--model", str(llada_tiny.folder), "--task", task, "--sampler", "topk:k=2", "--n", "12"]
    assert cli.main([*arguments, "--count", "ni"]) == 0
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.startswith("accuracy") and second.startswith("as ni counts: n 12 | tokens 8 | nfe ")
    assert cli.main([*arguments, "--count", "mine"]) == 2
    assert "no count is called 'mine'" in capsys.readouterr().err
