"""bench/profiles.py: from a trace to the share of each kind of work."""

import json

import pytest

from bench.profiles import kind_of, read_trace


def write_trace(path, events: list[tuple]):
    events = [dict(ph="X", cat=cat, name=name, ts=ts, dur=dur, tid=tid)
              for cat, name, ts, dur, tid in events]
    path.write_text(json.dumps(dict(traceEvents=[{"ph": "M", "name": "x"}, *events])))
    return path


STEPS = [("user_annotation", f"ProfilerStep#{k}", 1000 * k, 1000, 1) for k in (2, 3)]


def test_cpu(tmp_path):
    """An operation counts without those inside it; other threads don't count."""
    inside = [
        ("cpu_op", "aten::linear", 2100, 500, 1), ("cpu_op", "aten::addmm", 2200, 300, 1),
        ("cpu_op", "aten::_log_softmax", 3000, 200, 1), ("cpu_op", "aten::add", 3300, 100, 1),
        ("cpu_op", "aten::addmm", 3500, 300, 1), ("cpu_op", "aten::mm", 3600, 300, 2),
    ]
    profile = read_trace(write_trace(tmp_path / "trace", [*reversed(inside), *STEPS]), gpu=False)
    assert (profile["steps"], profile["seconds"], profile["gpu"]) == (2, 1e-3, False)
    ours = {operation["name"]: operation for operation in profile["operations"]}
    assert ours["aten::linear"]["seconds"] == pytest.approx(100e-6)
    assert ours["aten::addmm"] == dict(name="aten::addmm", kind="matrix products", calls=1,
                                       seconds=pytest.approx(300e-6))
    assert profile["operations"][0]["name"] == "aten::addmm"  # the longest first
    assert profile["split"] == pytest.approx({
        "attention": 0, "loss": 100e-6, "optimizer": 0, "matrix products": 400e-6,
        "fused by torch.compile": 0, "other": 50e-6, "idle": 450e-6,
    })


def test_gpu(tmp_path):
    """Kernels count, what the host does doesn't; idle is what lies between the kernels."""
    profile = read_trace(write_trace(tmp_path / "trace", [
        *STEPS, ("cpu_op", "aten::mm", 2000, 999, 1),
        ("gpu_user_annotation", "ProfilerStep#2", 2000, 1000, 7),
        ("kernel", "nvjet_hsh_128x256", 2500, 600, 7), ("gpu_memcpy", "Memcpy HtoD", 3100, 100, 7),
        ("kernel", "void pytorch_flash::flash_bwd_kernel", 3300, 1200, 7),
    ]), gpu=True)
    assert profile["seconds"] == pytest.approx(1e-3) and profile["gpu"]
    assert profile["split"] == pytest.approx({
        "attention": 600e-6, "loss": 0, "optimizer": 0, "matrix products": 300e-6,
        "fused by torch.compile": 0, "other": 50e-6, "idle": 50e-6,
    })


def test_kinds():
    for name, kind in (
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
        ("triton_poi_fused_gelu_2", "fused by torch.compile"), ("aten::copy_", "other"),
        ("graph_1_cpp_fused_add_native_layer_norm_view_3", "fused by torch.compile"),
    ):
        assert kind_of(name) == kind, name


def test_no_trace(tmp_path):
    path = tmp_path / "trace"
    for text in ("{", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="trace is no trace of training steps"):
            read_trace(path, gpu=False)
    with pytest.raises(ValueError, match="no trace"):
        read_trace(tmp_path / "none", gpu=False)
    with pytest.raises(ValueError, match="no trace"):  # a GPU's run in which no kernel was seen
        read_trace(write_trace(path, STEPS), gpu=True)
