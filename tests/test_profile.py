"""bench/studies/profile.py: from a trace to the share of each kind of work."""

import json
from pathlib import Path

import pytest
from made_up import MACHINE, carry_out, cells_of, setup_of, write_record

from bench.report.tables import found_in
from bench.studies.profile import Profile, kind_of, read_trace, split_of


def write_trace(path: Path, events: list[tuple]) -> Path:
    events = [dict(ph="X", cat=cat, name=name, ts=ts, dur=dur, tid=tid)
              for cat, name, ts, dur, tid in events]
    path.write_text(json.dumps(dict(traceEvents=[{"ph": "M", "name": "x"}, *events])))
    return path


STEPS = [("user_annotation", f"ProfilerStep#{k}", 1000 * k, 1000, 1) for k in (2, 3)]
KERNELS = [
    *STEPS, ("cpu_op", "aten::mm", 2000, 999, 1),
    ("gpu_user_annotation", "ProfilerStep#2", 2000, 1000, 7),
    ("kernel", "nvjet_hsh_128x256", 2500, 600, 7), ("gpu_memcpy", "Memcpy HtoD", 3100, 100, 7),
    ("kernel", "void pytorch_flash::flash_bwd_kernel", 3300, 1200, 7)]


def test_cpu(tmp_path):
    """An operation counts without those inside it; other threads don't count."""
    inside = [
        ("cpu_op", "aten::linear", 2100, 500, 1), ("cpu_op", "aten::addmm", 2200, 300, 1),
        ("cpu_op", "aten::_log_softmax", 3000, 200, 1), ("cpu_op", "aten::add", 3300, 100, 1),
        ("cpu_op", "aten::addmm", 3500, 300, 1), ("cpu_op", "aten::mm", 3600, 300, 2)]
    profile = read_trace(write_trace(tmp_path / "trace", [*reversed(inside), *STEPS]), gpu=False)
    assert (profile["steps"], profile["seconds"], profile["gpu"]) == (2, 1e-3, False)
    first, *others = profile["operations"]
    assert first == dict(name="aten::addmm", calls=1,
                         seconds=pytest.approx(300e-6))  # the longest first
    assert ("aten::linear", pytest.approx(100e-6)) in [
        (other["name"], other["seconds"]) for other in others]
    assert split_of(profile) == pytest.approx({
        "loss": 100e-6, "matrix products": 400e-6, "other": 50e-6, "idle": 450e-6})


def test_gpu(tmp_path):
    """Kernels count, what the host does doesn't; idle is what lies between the kernels."""
    profile = read_trace(write_trace(tmp_path / "trace", KERNELS), gpu=True)
    assert profile["seconds"] == pytest.approx(1e-3) and profile["gpu"]
    assert split_of(profile) == pytest.approx({
        "attention": 600e-6, "matrix products": 300e-6, "other": 50e-6, "idle": 50e-6})


@pytest.mark.parametrize(("name", "kind"), [
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8>", "loss"),
    ("nll_loss_backward_reduce_cuda_kernel_2d", "loss"),
    ("triton_red_fused__log_softmax_nll_loss_forward_3", "loss"),
    ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
    ("aten::_fused_adamw_", "optimizer"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
    ("ampere_bf16_s16816gemm_bf16_128x256", "matrix products"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "matrix products"),
    ("triton_tem_fused_mm_4", "matrix products"), ("aten::mm", "matrix products"),
    ("graph_1_cpp_fused__to_copy_add_amax_arange_div_eq_exp_gather_log_split_sub_sum_view_5",
     "loss"), ("triton_red_fused__to_copy_add_amax_arange_exp_gather_log_sub_sum_3", "loss"),
    ("triton_poi_fused_gelu_2", "fused by torch.compile"), ("aten::copy_", "other"),
    ("graph_1_cpp_fused_add_native_layer_norm_view_3", "fused by torch.compile")])
def test_kinds(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize("text", [None, "{", "[]", '{"traceEvents": []}',
                                  '{"traceEvents": [{"ph": "X"}]}'])
def test_no_trace(tmp_path, text):
    path = tmp_path / "trace"
    if text is not None:
        path.write_text(text)
    for gpu in (False, True):
        with pytest.raises(ValueError, match="trace is no trace of training steps"):
            read_trace(path, gpu)


def test_no_kernel(tmp_path):
    """A GPU's run in which none was seen; a CPU's without an operation."""
    for gpu in (False, True):
        with pytest.raises(ValueError, match="no trace of training steps"):
            read_trace(write_trace(tmp_path / "trace", STEPS), gpu)


def test_what_a_run_leaves(tmp_path):
    """One trace, which is kept beside what was read from it; and the page's tables of that."""
    study, setup, folder = Profile(), setup_of(tmp_path, MACHINE), tmp_path / "run"
    folder.mkdir()
    assert study.extra(tmp_path, []) == ""
    with pytest.raises(ValueError, match="it left no trace"):
        study.collect(setup, folder)
    trace = write_trace(folder / "a.trace.json", STEPS)
    with pytest.raises(ValueError, match="no trace of training steps"):
        study.collect(setup, folder)
    assert not list(tmp_path.glob("*.json"))
    write_trace(trace, KERNELS)
    for evaluated in (2, 11):  # after the second step of an epoch, or after its eleventh
        record = write_record(folder, "01-profile", tokens=1024 * evaluated, steps=12)
        with pytest.raises(ValueError, match="since an epoch has fewer than 12 steps"):
            study.collect(setup, folder)
        record.unlink()
    assert not list(tmp_path.glob("*.json"))
    write_record(folder, "01-profile", tokens=1024 * 12, steps=12)
    study.collect(setup, folder)
    assert (tmp_path / "profile.trace.json").read_bytes() == trace.read_bytes()
    text = study.extra(tmp_path, [])
    assert text.startswith("2 steady steps, 1.0 ms each") and "`profile.trace.json`" in text
    assert cells_of(text.partition("| kernel")[0])["attention"] == {
        "kind": "attention", "ms per step": "0.60", "share": "60.0%"}
    assert "| `nvjet_hsh_128x256` | matrix products | 0.5 | 0.30 | 30.0% |" in text
    for error, told in ((None, text), ("it broke", "it broke")):
        ((plan, rows),) = carry_out(study, setup, lambda _, error=error: [
            dict(name="01-profile", error=error)])
        assert study.result(found_in(tmp_path, "profile")[0][0], rows).endswith(told)
    write_trace(folder / "b.trace.json", KERNELS)
    with pytest.raises(ValueError, match="it left no trace"):
        study.collect(setup, folder)
