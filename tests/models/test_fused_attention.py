"""The C++ kernels of x86 CPUs, attention, SwiGLU and gradients of weights: values and gradients of fp64, for every kind
of row; refused where it would be wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from engine_fixtures import require_product
from tiny_models import random_model, tokens
from transformers_families import random_family

from models.layers.attention import attention, document_mask
from models.layers.cpu_kernels import library
from models.layers.cpu_kernels.fused_attention import fused_attention
from models.layers.cpu_kernels.library import KernelsUnavailableError, load_kernels
from models.layers.cpu_kernels.upcast_products import upcast_products
from models.layers.projections import fused_projection, supports_gradients, swiglu_output, weight_gradients

ERRORS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # relative, of the norm; blocks of 64 queries: 2e-6 and 1e-2
SHAPES = {  # rows, query heads, key heads, tokens, head width, documents per row
    "minimind": (4, 8, 2, 512, 64, 13),
    "odd": (1, 9, 3, 700, 64, 3),
    "one-key-head": (2, 16, 1, 70, 16, 2),
    "wide-heads": (1, 32, 1, 70, 128, 2),
    "every-head-its-key": (2, 4, 4, 100, 32, 1),
    "several-chunks-of-keys": (1, 6, 1, 1100, 96, 1),
}


def run(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    try:
        return fused_attention(x.to(dtype), x.to(dtype), x.to(dtype), None)[0]
    except KernelsUnavailableError as error:
        pytest.skip(f"{dtype} on this machine: {error}")


def random_rows(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return queries, keys, values, the gradient of the output, and the mask; the last row ends in padding."""
    B, N, K, T, H, documents = shape
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(B, T, heads, H, generator=generator).to(dtype).transpose(1, 2) for heads in (N, K, K, N)]
    if documents == 1:
        return tensors, None
    ids = torch.zeros(B, T, dtype=torch.long)
    for row in ids:
        for cut in torch.randperm(T - 1, generator=generator)[: documents - 1] + 1:
            row[int(cut) :] += 1
    ids[-1, -5:] = -1
    return tensors, document_mask(ids, 0.0)


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return out, *torch.autograd.grad(out, (q, k, v), g)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fused_attention_has_the_values_and_gradients_of_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (q, k, v, g), mask = random_rows(shape, dtype)
    assert_exact([q, k, v], g, mask, dtype)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_fused_attention_in_bf16_with_fp32_products_rounds_results_only(shape: tuple[int, ...]) -> None:
    (q, k, v, g), mask = random_rows(shape, torch.bfloat16)
    upcast_products(True)
    try:
        assert_exact([q, k, v], g, mask, torch.bfloat16, error=2e-3)
    finally:
        upcast_products(False)


def assert_exact(
    qkv: list[torch.Tensor], g: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype, error: float | None = None
) -> None:
    run(torch.ones(1, 1, 1, 16), dtype)
    inputs = [x.detach().requires_grad_() for x in qkv]
    exact = [x.detach().double().requires_grad_() for x in qkv]
    allowed = torch.ones(g.shape[2], g.shape[2], dtype=torch.bool).tril() if mask is None else mask
    expected = gradients(*exact, g.double(), F.scaled_dot_product_attention(*exact, attn_mask=allowed, enable_gqa=True))
    computed = gradients(*inputs, g, attention(*inputs, mask, 0.0, "fused"))
    for ours, reference in zip(computed, expected, strict=True):
        assert (ours.double() - reference).norm() <= (error or ERRORS[dtype]) * reference.norm()


@pytest.mark.usefixtures("kernels")
def test_fused_attention_has_the_same_bits_for_every_number_of_threads() -> None:
    (q, k, v, g), mask = random_rows(SHAPES["minimind"], torch.float32)
    results, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            results.append(gradients(*inputs, g, attention(*inputs, mask, 0.0, "fused")))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("kernels")
def test_fused_attention_reads_tensors_of_any_layout() -> None:
    (q, k, v, _), mask = random_rows(SHAPES["odd"], torch.float32)
    expected = attention(q, k, v, mask, 0.0, "fused")
    for change in (
        torch.Tensor.contiguous,
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: x.clone()[:, :, :],
    ):
        assert torch.equal(attention(change(q), change(k), change(v), mask, 0.0, "fused"), expected)


@pytest.mark.usefixtures("kernels")
def test_fused_attention_keeps_nan_and_only_in_its_document() -> None:
    (q, k, v, _), _ = random_rows((1, 2, 1, 96, 32, 1), torch.float32)
    mask = document_mask(torch.arange(96)[None] // 32, 0.0)
    q[0, 0, 40], k[0, 0, 70] = torch.nan, torch.inf
    out = attention(q, k, v, mask, 0.0, "fused")
    assert out[0, 0, 40].isnan().all() and out[0, 0, :40].isfinite().all() and out[0, 1, 32:64].isfinite().all()
    assert out[0, :, 71:].isnan().any() and out[0, :, :70][:, torch.arange(70) != 40].isfinite().all()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", ["window", "both directions", "hole", "first row"])
def test_fused_attention_refuses_a_mask_that_is_not_one_of_documents(kind: str) -> None:
    (q, k, v, _), _ = random_rows((1, 6, 2, 32, 16, 1), torch.float32)
    allowed = torch.ones(32, 32, dtype=torch.bool).tril()
    if kind == "window":
        allowed &= torch.ones(32, 32, dtype=torch.bool).triu(-8)
    elif kind == "both directions":
        allowed[:8, :8] = True
    elif kind == "hole":
        allowed[20, 10] = False
    else:
        allowed[0, 1] = True
    with pytest.raises(ValueError, match="a mask of documents"):
        fused_attention(q, k, v, allowed[None, None])


@pytest.mark.usefixtures("kernels")
def test_fused_attention_is_exact_for_keys_and_values_with_a_common_mean() -> None:
    """In bf16 the gradient of the queries is a difference of large numbers then: with a sum of the rounded output its
    error is 0.1.
    """
    generator = torch.Generator().manual_seed(6)
    q, k, v, g = (torch.randn(1, 128, heads, 64, generator=generator) for heads in (4, 2, 2, 4))
    tensors = [x.bfloat16().transpose(1, 2) for x in (q, k + 3, v + 3)]
    out = []
    for dtype in (torch.bfloat16, torch.float64):
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
        y = (
            run_causal(q, k, v)
            if dtype == torch.bfloat16
            else F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        )
        out.append(torch.autograd.grad(y, (q, k, v), g.bfloat16().transpose(1, 2).to(dtype)))
    for ours, exact in zip(*out, strict=True):
        assert (ours - exact).norm() <= 0.03 * exact.norm()


def run_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    try:
        with torch.autocast("cpu", torch.bfloat16):  # as in a step
            return fused_attention(q, k, v, None)[0]
    except KernelsUnavailableError as error:
        pytest.skip(f"bf16 on this machine: {error}")


@pytest.mark.usefixtures("kernels")
def test_fused_attention_leaves_other_widths_and_types_to_the_blocks() -> None:
    for dtype, width in ((torch.float16, 64), (torch.float32, 24), (torch.float64, 64)):
        (q, k, v, _), _ = random_rows((1, 2, 1, 32, width, 1), dtype)
        assert torch.equal(attention(q, k, v, None, 0.0, "fused"), attention(q, k, v, None, 0.0, "auto"))


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("#!/bin/sh\necho 'attention.cpp:1: error: no such processor' >&2\nexit 1\n", "no such processor"),
        ("#!/bin/sh\nexit 0\n", "No such file"),
    ],
    ids=["error", "no output"],
)
def test_kernels_that_cannot_be_compiled_are_unavailable_with_the_reason(
    compiler: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cxx").write_text(compiler)
    (tmp_path / "cxx").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    monkeypatch.setattr(library, "_library", None)
    if library.platform.machine() not in library.MACHINES:
        reason = "Linux on x86"
    with pytest.raises(KernelsUnavailableError, match=reason):
        load_kernels(tmp_path / "kernels")
    assert not list((tmp_path / "kernels").rglob("*.so"))


@pytest.mark.slow
def test_brgemm_of_an_old_instruction_set_is_unavailable_in_bf16(kernels: None) -> None:
    """oneDNN refuses; the caller hears of it instead of reading a result that was never written."""
    # loaded by the fixture; `load_kernels` compiles for each instruction set
    file = library._library._name  # type: ignore[union-attr]  # an object of ctypes
    program = f"""
import ctypes, sys, torch; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from models.layers.cpu_kernels import library
from models.layers.cpu_kernels.library import KernelsUnavailableError
from models.layers.cpu_kernels.fused_attention import fused_attention
library._library = ctypes.CDLL({file!r})
x = torch.ones(1, 1, 16, 16, dtype=torch.bfloat16)
try:
    fused_attention(x, x, x, None)
except KernelsUnavailableError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        check=True,
    )
    assert "no matrix product" in done.stdout


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox", "phi3"])
def test_fused_attention_of_transformers_has_the_gradients_of_the_blocks(model_type: str) -> None:
    model = random_family(
        model_type, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=None
    )
    model.prepare(is_packed=True)
    assert model.attention_sizes and model.attention_sizes[0] == 4
    ids = torch.randint(0, 100, (2, 40), generator=torch.Generator().manual_seed(2))
    packed = {
        "document_ids": torch.arange(40).expand(2, 40) // 16,
        "position_ids": torch.arange(40).expand(2, 40) % 16,
        "lengths": torch.tensor([16, 16, 8] * 2),
    }
    results = []
    for kernel in ("auto", "fused"):
        model.use_attention_kernel(kernel)
        model.zero_grad()
        loss = model.train()(ids, ids, reduction="sum", **packed).nll
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert not torch.equal(results[0][1], results[1][1])  # another kernel did compute it
    for blocks, fused in zip(*results, strict=True):
        assert (blocks - fused).norm() <= 1e-5 * blocks.norm()


def test_models_with_sliding_windows_keep_the_blocks() -> None:
    model = random_family("mistral", sliding_window=8)
    model.prepare(is_packed=True)
    assert model.attention_sizes is None


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("is_trained", [True, False])
def test_fused_network_has_the_values_and_gradients_of_fp64(dtype: torch.dtype, is_trained: bool) -> None:
    require_product(dtype)
    generator = torch.Generator().manual_seed(3)
    gate_up, weight, g = (torch.randn(shape, generator=generator) for shape in ((2, 40, 96), (32, 48), (2, 40, 32)))
    gate_up, g = (gate_up * 4).to(dtype), g.to(dtype)
    gate_up[0, 0, :8] = torch.tensor([200.0, -200.0, 88.0, -88.0, 0.0, 1e-30, -1e-30, 30.0])
    weight = weight.to(dtype).float()  # of fp32, as parameters are
    results = []
    for x, w, gradient in ((gate_up, weight, g), (gate_up.double(), weight.double(), g.double())):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_(is_trained)
        gate, up = x.chunk(2, -1)
        out = swiglu_output(x, w) if x.dtype == dtype else (F.silu(gate) * up) @ w.mT
        results.append([out, *torch.autograd.grad(out, [x, w] if is_trained else [x], gradient)])
    for ours, reference in zip(*results, strict=True):
        assert ours.isfinite().all() and (ours.double() - reference).norm() <= ERRORS[dtype] * reference.norm()


@pytest.mark.usefixtures("kernels")
def test_fused_network_keeps_nan() -> None:
    gate_up = torch.zeros(2, 32)
    gate_up[0, 3] = gate_up[1, 20] = torch.nan
    assert swiglu_output(gate_up, torch.eye(16)).isnan().any(-1).all()


def loss_and_gradients(kernel: str, dtype: torch.dtype) -> list[torch.Tensor]:
    model, ids = random_model(), tokens(2, 40)
    model.use_attention_kernel(kernel)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model.train()(ids, ids, reduction="sum").nll
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.usefixtures("kernels")
def test_decoder_with_fused_kernels_has_the_default_loss_and_gradients() -> None:
    results = [loss_and_gradients(kernel, torch.float32) for kernel in ("auto", "fused")]
    assert not torch.equal(results[0][1], results[1][1])
    for default, fused in zip(*results, strict=True):
        assert (default - fused).norm() <= 1e-5 * default.norm()


@pytest.mark.usefixtures("kernels")
def test_decoder_with_the_fused_kernels_is_as_exact_in_bf16_as_the_default() -> None:
    run(torch.randn(1, 16, 1, 16).transpose(1, 2), torch.bfloat16)
    exact = torch.cat([x.flatten() for x in loss_and_gradients("auto", torch.float32)])
    default, fused = (
        (torch.cat([x.flatten() for x in loss_and_gradients(kernel, torch.bfloat16)]) - exact).norm()
        for kernel in ("auto", "fused")
    )
    assert fused <= 1.2 * default


GRADIENT_SHAPES = {  # tokens, inputs, outputs of each weight
    "one-token": (1, 16, [16]),
    "odd": (33, 48, [32]),
    "several-blocks-of-tokens": (1100, 32, [32, 16]),
    "several-blocks-of-inputs": (100, 528, [16, 16]),
    "several-blocks-of-outputs": (64, 32, [800, 16, 272]),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("shape", GRADIENT_SHAPES.values(), ids=GRADIENT_SHAPES)
def test_weight_gradients_are_those_of_fp64_rounded_to_fp32(shape: tuple[int, int, list[int]]) -> None:
    run(torch.randn(1, 16, 1, 16).transpose(1, 2), torch.bfloat16)
    (rows, width, sizes), generator = shape, torch.Generator().manual_seed(4)
    g, x = (torch.randn(rows, columns, generator=generator).bfloat16() for columns in (sum(sizes), width))
    exact = (g.double().mT @ x.double()).split(sizes)
    found = weight_gradients(g, x, sizes)
    for ours, reference in zip(found, exact, strict=True):
        assert (
            ours.shape == reference.shape
            and ours.is_contiguous()
            and (ours - reference).norm() <= 1e-6 * reference.norm()
        )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, found, weight_gradients(g, x, sizes)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("num_tokens", [31, 32], ids=["fewer tokens than inputs", "as many"])
def test_weights_are_joined_where_there_are_as_many_tokens_as_inputs(num_tokens: int) -> None:
    torch.manual_seed(5)
    linears = [torch.nn.Linear(32, size) for size in (48, 16)]
    x = torch.randn(num_tokens, 32, requires_grad=True)
    outputs = fused_projection(x, *linears)
    gradient = torch.autograd.grad(outputs, x, [y.detach() for y in outputs])[0]
    alone = [y.detach() @ linear.weight for y, linear in zip(outputs, linears, strict=True)]
    joined = torch.cat(outputs, -1).detach() @ torch.cat([linear.weight for linear in linears])
    for y, linear in zip(outputs, linears, strict=True):
        torch.testing.assert_close(y, linear(x))
    assert torch.equal(gradient, sum(alone)) == (num_tokens == 31)
    assert torch.equal(gradient, joined) == (num_tokens == 32)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bias", [True, False])
def test_projection_by_the_kernel_has_the_gradients_of_torch(bias: bool) -> None:
    """For operands of any layout; those of weights have less error, because they are not rounded to bf16."""
    run(torch.randn(1, 16, 1, 16).transpose(1, 2), torch.bfloat16)
    torch.manual_seed(5)
    linears = [torch.nn.Linear(32, size, bias=bias) for size in (48, 16)]
    data = torch.randn(32, 3, 50).bfloat16()
    g = torch.randn(64).bfloat16().expand(3, 50, 64)
    results = []
    for use_kernel in (True, False):
        x = data.detach().requires_grad_()
        y = torch.cat(fused_projection(x.permute(1, 2, 0), *linears, use_kernel=use_kernel), -1)
        results.append([y, *torch.autograd.grad(y, [x, *(p for linear in linears for p in linear.parameters())], g)])
    for number, (ours, reference) in enumerate(zip(*results, strict=True)):
        assert ours.dtype == reference.dtype and ours.stride() == reference.stride()
        assert (ours - reference).double().norm() <= (1e-2 if number else 0) * reference.double().norm()


@pytest.mark.usefixtures("kernels")
def test_projection_by_the_kernel_has_no_gradient_of_frozen_weights() -> None:
    linear = torch.nn.Linear(32, 16, bias=False).requires_grad_(False)
    x = torch.randn(4, 32).bfloat16().requires_grad_()
    (y,) = fused_projection(x, linear, use_kernel=True)
    y.sum().backward()
    assert x.grad is not None and linear.weight.grad is None


def test_weight_gradients_of_other_types_and_widths_are_left_to_torch() -> None:
    g, x, weight = torch.zeros(4, 16).bfloat16(), torch.zeros(4, 32).bfloat16(), torch.zeros(16, 32)
    assert supports_gradients(g, x, [weight])
    assert not supports_gradients(g.float(), x.float(), [weight])
    assert not supports_gradients(g, x, [weight.bfloat16()])
    assert not supports_gradients(g[:, :8], x, [weight[:8]]) and not supports_gradients(g, x[:, :24], [weight[:, :24]])
    assert not supports_gradients(g[:0], x[:0], [weight])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "damage",
    ["zeros", *(pytest.param(damage, marks=pytest.mark.slow) for damage in ("empty", "cut", "header", "no checksum"))],
)
def test_library_that_a_crash_or_a_disk_has_damaged_is_compiled_again(damage: str, tmp_path: Path) -> None:
    """Loading a part of a shared object ends the process with SIGBUS; zeros within it give wrong results, or SIGSEGV."""
    source = tmp_path / "source.cpp"
    source.write_text(
        'extern "C" int answer() { return 42; }\n'
        + "\n".join(f'extern "C" int f{i}(int x) {{ return x * {i}; }}' for i in range(50))
    )
    assert answer_in_a_fork(source) == 42
    (program,) = tmp_path.rglob("test-*.so")
    whole = program.read_bytes()
    program.unlink()
    zeros = whole[:8192] + bytes(4096) + whole[12288:]
    contents = {
        "empty": b"",
        "cut": whole[: len(whole) // 3],
        "zeros": zeros,
        "header": b"\x7fELG" + whole[4:],
        "no checksum": whole[:-32],
    }
    assert contents[damage] != whole
    program.write_bytes(contents[damage])
    assert answer_in_a_fork(source) == 42 and len(program.read_bytes()) == len(whole)


def answer_in_a_fork(source: Path) -> int:
    """Return what `answer` of the library returns, in a process that has not loaded it before, or its signal."""
    if not (pid := os.fork()):
        try:
            os._exit(library.load_library("test", [source], source.parent).answer())
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_build_deletes_the_folders_of_builds_that_were_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    old, running = (tmp_path / library.FOLDER / name for name in ("tmp_old", "tmp_running"))
    for folder in (old, running):
        folder.mkdir(parents=True)
        (folder / "kernels.so").touch()
    os.utime(old, (1e9, 1e9))
    with pytest.raises(KernelsUnavailableError):
        library.load_library("test", [], tmp_path)
    assert list((tmp_path / library.FOLDER).iterdir()) == [running]


def test_compiler_that_answers_nothing_leaves_the_kernels_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "hangs"
    compiler.write_text("#!/bin/sh\nsleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "COMPILE_TIMEOUT", 0.1)
    with pytest.raises(KernelsUnavailableError, match="timed out"):
        library.load_library("test", [], tmp_path)


@pytest.mark.usefixtures("kernels")
def test_fused_attention_gradient_of_large_scores_is_exact_in_fp32() -> None:
    """The log-sum-exp of such scores is rounded, so their probabilities have another sum than 1: not divided by it, the
    error is 0.1.
    """
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randn(1, heads, 128, 64, generator=generator) + mean for heads, mean in ((4, 5), (2, 50), (2, 20))]
    g = torch.randn(1, 4, 128, 64, generator=generator)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        q, k, v = (x.to(dtype).requires_grad_() for x in tensors)
        if dtype == torch.float32:
            y = fused_attention(q, k, v, None)[0]
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        gradients.append(torch.autograd.grad(y, (q, k, v), g.to(dtype)))
    for ours, exact in zip(*gradients, strict=True):
        assert (ours - exact).norm() <= 5e-3 * exact.norm()
