"""Products with what follows them: bias, activation, and a narrow output with scales."""

from __future__ import annotations

ACTIVATIONS = {"none": "", "gelu": "gelu %sum", "silu": "silu %sum", "relu": "max %sum 0"}
LARGEST = {"f8e4m3": 448, "i8": 127}  # larger floats become NaN, larger integers wrap

_PRODUCT = """\
kernel {name}  v1
  dims M=256 K=256 N=256{block}
  tune bm=64{bn} bk=64
  speed warps=4 stages=3
  grid i=M//bm j=N//{n}
  in x : {dtype}[M, K] tiles [bm, bk]
  in w : {dtype}[K, N] tiles [bk, {n}]
{refs}
  %zero = full shape=bm,{n} value=0
  %{sum} = loop k in 0..K//bk carry %zero
    %x = load x[i, k]
    %w = load w[k, j]
    %part = dot %x %w
    %next = add %zero %part
    next %next
{after}
  store y[i, j] = %y"""


def product(
    bias: bool = False, activation: str = "none", to: str = "f32", dtype: str = "bf16"
) -> str:
    """The text of y = activation(x @ w + b) in the dtype `to`, for x and w in `dtype`.

    "f8e4m3" and "i8" give each row a scale per `block` of channels, so that the block's largest
    number becomes the largest of the format: y * scale is the result.
    """
    names = ["product", *["bias"] * bias, *[activation] * (activation != "none"), to]
    n = "block" if to in LARGEST else "bn"
    refs = [f"in b : f32[N] tiles [{n}]"] * bias + [f"out y : {to}[M, N] tiles [bm, {n}]"]
    after, last = [], "%sum"
    if bias:
        after += ["%b = load b[j]", "%across = row %b", "%sum = add %dots %across"]
    if ACTIVATIONS[activation]:
        after.append(f"%act = {ACTIVATIONS[activation]}")
        last = "%act"
    if to in LARGEST:
        refs.append("out scale : f32[M, N//block] tiles [bm, 1]")
        after += [*packed(last, to), "store scale[i, j] = %scale"]
    else:
        after.append(f"%y = cast {last} to={to}")
    return _PRODUCT.format(
        name="_".join(names), dtype=dtype, n=n, sum="dots" if bias else "sum",
        block=" block=128" if to in LARGEST else "", bn="" if to in LARGEST else " bn=64",
        refs="\n".join(f"  {r}" for r in refs), after="\n".join(f"  {a}" for a in after),
    )  # fmt: skip


def packed(value: str, to: str) -> list[str]:
    """The lines that make `%y` in the dtype `to` and a `%scale` for each row, from an f32 value of
    two dims."""
    most = LARGEST[to]
    lines = [
        f"%size = abs {value}",
        "%most = max %size dim=1",
        "%some = gt %most 0",
        f"%fit = mul %most {1 / most!r}",
        "%scale = where %some %fit 1",
        "%down = col %scale",
        f"%ratio = div {value} %down",
        f"%above = max %ratio {-most}",
        f"%inside = min %above {most}",
    ]
    if to == "i8":  # a cast cuts off what is behind the point
        lines += [
            "%minus = lt %inside 0",
            "%lower = sub %inside 0.5",
            "%upper = add %inside 0.5",
            "%round = where %minus %lower %upper",
        ]
    return [*lines, f"%y = cast %{'round' if to == 'i8' else 'inside'} to={to}"]


MLP_UP = product(True, "gelu", "bf16").replace("product_bias_gelu_bf16", "mlp_up")
