"""Models that FSDP2 shards within a machine, trained across machines: two replicas of two shards."""

import re
import sys
from pathlib import Path

import pytest
import signpost
from ranks_test import printed_in, run
from shards_job import OPTIMIZERS

JOB = str(Path(__file__).with_name("shards_job.py"))
KINDS = list(OPTIMIZERS)
GO_BACK = ["one_bit_adam", "follows", "zero_one_adam"]
HOOKS = ["fsdp", "fp32", "int8"]


def run_together(workers, *scenarios):
    words = " + ".join(scenarios).split()
    code, output = run(workers, 2, sys.executable, JOB, *words)
    assert code == 0
    return printed_in(scenarios, output)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def sharded(directory):
    return run_together(
        4,
        *(f"trains {kind}" for kind in KINDS),
        *(f"trains {kind} uneven" for kind in KINDS),
        *(f"trains {kind} even_rows" for kind in KINDS),
        *(f"trains {kind} uneven_rows 0.5" for kind in ("one_bit_adam", "zero_one_adam")),
        "trains one_bit_adam even 0.5",
        "trains zero_one_adam uneven 0.5",
        "trains one_bit_adam even 0 overlap",
        "trains one_bit_adam even_rows 0 overlap",
        "lacks_gradients",
        "lacks_gradients overlap",
        "scales even",
        "scales even_rows",
        "is_adamw",
        "is_adamw 0.5",
        *(f"saves {kind} {directory}/{kind} uneven" for kind in KINDS),
        *(f"resumes {kind} {directory}/{kind} uneven" for kind in KINDS),
        *(f"resumes {kind} {directory}/{kind} uneven_rows" for kind in KINDS),
        *(f"trains {kind} default_chunks" for kind in GO_BACK),
        *(f"goes_back {kind} {directory}/back_{kind} default_chunks" for kind in GO_BACK),
        *(f"hook {codec}" for codec in HOOKS),
        *(f"resumes adam {directory}/adam uneven {replicas}" for replicas in (1, 4)),
    )


@pytest.fixture(scope="module")
def whole(sharded, directory):
    return run_together(
        2,
        *(f"trains {kind}" for kind in KINDS),
        *(f"resumes {kind} {directory}/{kind} uneven" for kind in ("adam", "one_bit_adam")),
    )


def digest_of(output, ranks=4):
    digests = re.findall(r"parameters ([0-9a-f]{8})", output)
    assert len(digests) == ranks and len(set(digests)) == 1
    return digests[0]


def number(name, output):
    """Returns the number of that name that each rank printed."""
    return [float(said) for said in re.findall(rf"\b{name} ([0-9.]+)", output)]


@pytest.mark.parametrize("how", ["", " even_rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_replicas_of_two_shards_have_the_bits_of_two_whole_ranks(sharded, whole, kind, how):
    assert digest_of(sharded[f"trains {kind}{how}"]) == digest_of(whole[f"trains {kind}"], 2)


@pytest.mark.parametrize("how", ["", " even_rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_has_its_share_of_the_state_and_of_the_bytes(sharded, whole, kind, how):
    for said in re.findall(r"state (\d+) of (\d+)", sharded[f"trains {kind}{how}"]):
        fields = 7 if kind == "zero_one_adam" else 3
        assert int(said[0]) * 2 == fields * int(said[1])
    of_shards = number("bytes", sharded[f"trains {kind}{how}"])
    of_whole = number("bytes", whole[f"trains {kind}"])
    # Frames' headers and the small exchanges of joining are not shared out.
    assert max(of_shards) < 0.6 * min(of_whole)
    bits = number("bits", whole[f"trains {kind}"])
    assert number("bits", sharded[f"trains {kind}{how}"]) == pytest.approx(bits * 2, rel=0.01)


def test_adam_is_adamw_on_the_mean_over_shards_and_replicas(sharded):
    digest_of(sharded["is_adamw"])
    digest_of(sharded["is_adamw 0.5"])


def test_gradients_are_clipped_by_the_norm_over_shards_and_replicas(sharded):
    """Local steps of 0/1 Adam by the norm over shards alone."""
    norms = {
        "trains one_bit_adam even 0.5": 1,
        "trains zero_one_adam uneven 0.5": 2,
        "trains one_bit_adam uneven_rows 0.5": 1,
        "trains zero_one_adam uneven_rows 0.5": 2,
    }
    for scenario, different in norms.items():
        said = number("norm", sharded[scenario])
        assert len(said) == 4 and len(set(said)) == different
        assert all(said.count(norm) == 4 // different for norm in said)
        digest_of(sharded[scenario])


def test_the_loss_scale_is_each_processs_own(sharded):
    assert digest_of(sharded["scales even"]) == digest_of(sharded["scales even_rows"])


def test_a_process_may_lack_gradients(sharded):
    assert digest_of(sharded["lacks_gradients"]) == digest_of(sharded["lacks_gradients overlap"])


def test_gradients_that_are_sent_in_the_backward_pass_have_the_same_bits(sharded):
    wanted = digest_of(sharded["trains one_bit_adam"])
    for model in ("even", "even_rows"):
        assert digest_of(sharded[f"trains one_bit_adam {model} 0 overlap"]) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_distributed_checkpoint_changes_nothing_and_leads_to_the_same_bits(
    sharded, directory, kind
):
    wanted = digest_of(sharded[f"trains {kind} uneven"])
    saves = sharded[f"saves {kind} {directory}/{kind} uneven"]
    resumes = sharded[f"resumes {kind} {directory}/{kind} uneven"]
    assert digest_of(saves) == wanted
    assert resumes.count("goes on from step 13") == 4
    assert digest_of(resumes) == wanted and "warning" not in resumes
    # The state of whole parameters has the same shards.
    assert digest_of(sharded[f"resumes {kind} {directory}/{kind} uneven_rows"]) == wanted


def test_a_hook_averages_for_the_optimizer_that_a_program_has(sharded):
    by_fsdp, in_fp32, in_int8 = (sharded[f"hook {codec}"] for codec in HOOKS)
    assert digest_of(in_fp32) == digest_of(by_fsdp)
    digest_of(in_int8)
    assert number("loss", in_int8)[0] == pytest.approx(number("loss", by_fsdp)[0], rel=0.01)


@pytest.mark.parametrize("kind", GO_BACK)
def test_an_optimizer_goes_back_to_what_it_has_saved(sharded, directory, kind):
    went_back = sharded[f"goes_back {kind} {directory}/back_{kind} default_chunks"]
    assert digest_of(went_back) == digest_of(sharded[f"trains {kind} default_chunks"])


def test_a_process_that_dies_ends_the_others_and_all_go_on_from_the_checkpoint(sharded, tmp_path):
    code, output = run(4, 2, sys.executable, JOB, "dies", "follows", str(tmp_path), "uneven")
    assert code == 128 + 9
    assert "parameters" not in output
    resumes = f"resumes follows {tmp_path} uneven"
    assert digest_of(run_together(4, resumes)[resumes]) == digest_of(
        sharded["trains follows uneven"]
    )


@pytest.mark.parametrize("replicas", [1, 4])
def test_other_numbers_of_shards_and_replicas_go_on_from_it(sharded, directory, replicas):
    wanted = number("loss", sharded[f"resumes adam {directory}/adam uneven"])
    output = sharded[f"resumes adam {directory}/adam uneven {replicas}"]
    assert output.count("goes on from step 13") == 4
    digest_of(output)
    assert number("loss", output)[0] == pytest.approx(wanted[0], rel=1e-5)
    assert output.count("a part of what compression has left out") == (4 if replicas == 1 else 0)


@pytest.mark.parametrize("kind, tolerance", [("adam", 1e-5), ("one_bit_adam", 0.005)])
def test_a_model_without_shards_goes_on_from_it(sharded, whole, directory, kind, tolerance):
    wanted = number("loss", sharded[f"resumes {kind} {directory}/{kind} uneven"])
    output = whole[f"resumes {kind} {directory}/{kind} uneven"]
    assert output.count("goes on from step 13") == 2
    digest_of(output, 2)
    assert number("loss", output)[0] == pytest.approx(wanted[0], rel=tolerance)


MISUSES = {
    "shards_over_all": "the model is sharded over all 4 processes, so there are no gradients to exchange",
    "hybrid": "fully_shard\\(\\) then averages gradients over replicas itself, in full precision",
    "other_replicas": "those that have the same shard as rank [0-3] are \\[[0-3], [0-3]\\]",
    "in_part": "call fully_shard\\(\\) on the model itself too",
    "whole_with_mesh": "replicate_mesh is given, and no parameter is a DTensor",
    "lamb": "1-bit LAMB does not train shards",
    "as_deepspeed": 'with compat="deepspeed" each tensor has one scale',
    "checkpoints": "is saved and loaded with its model by torch.distributed.checkpoint",
    "adds_a_whole_one": "call fully_shard\\(\\) on the model itself too",
    "local_tensors": "is this process's shard of a DTensor, and would be averaged",
    "rows_of_dtensors": "shard_mesh is for whole parameters, and one is a DTensor",
    "rows_of_a_scalar": "a scalar, which has no rows to share out: make it of shape \\[1\\]",
    "hook_of_whole_model": "no parameter of the model is a DTensor",
    "other_ranks_state": "that of 2 ranks for each of 2 shards, and this job has 1 ranks for each of 4",
}


@pytest.fixture(scope="module")
def misuses(sharded, directory):
    return run_together(4, *(f"misuse {name} {directory}" for name in MISUSES))


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_with_what_helps(misuses, directory, name):
    said = misuses[f"misuse {name} {directory}"]
    assert len(re.findall(f"refused: .*{MISUSES[name]}", said)) == 4


def test_the_example_trains_and_goes_on(tmp_path):
    example = Path(signpost.__file__).with_name("examples") / "with_fsdp2.py"

    def trains(steps):
        code, output = run(
            4, 1, sys.executable, str(example), f"--steps={steps}", f"--save={tmp_path / 'saved'}"
        )
        assert code == 0 and "Warning" not in output
        return output

    assert "steps 0 to 20: loss 3." in trains(20)
    assert "steps 20 to 100: loss 2." in trains(100)
