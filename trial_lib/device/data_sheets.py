"""The peak FLOP/s of devices, for model FLOPs utilisation. Pure; standard library only.

Figures are those of NVIDIA's data sheets, for the product form in a device's name. They are dense, without the 2:4
sparsity of many sheets, with sums in 32 bits. For GeForce cards and RTX 6000 Ada they are from the architectures' white
papers (Turing TU102, Ampere GA102, Ada, RTX Blackwell, appendix A). Those of RTX 3060 are of its cores and boost clock
on NVIDIA's page, at the rates of GA102. For Blackwell's data centre parts they are from the HGX and NVL72 sheets,
divided by their GPUs. AMD's are from the sheets of MI300X, MI325X, MI350X and MI355X. The last two lack TF32.

The figures of TITAN RTX, RTX 2080 Ti, 3060, 3070, 3080, 3090 Ti and 4080, MI350X and MI355X were not compared with
these documents again. They agree with what cores and clock give.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class DataSheet:
    multiprocessors: int  # of the whole device
    float32: float  # TFLOP/s without tensor cores
    tf32: float | None = None  # TFLOP/s of tensor cores on 32-bit numbers; None if it has none of that kind, as below
    float16: float | None = None  # on 16-bit numbers
    bfloat16: float | None = None  # likewise
    float8: float | None = None  # on 8-bit numbers


def _ampere(multiprocessors: int, float32: float, tf32: float, half: float) -> DataSheet:
    return DataSheet(multiprocessors, float32, tf32, half, half)


def _later(multiprocessors: int, float32: float, tf32: float, half: float, float8: float) -> DataSheet:
    return DataSheet(multiprocessors, float32, tf32, half, half, float8)


_H100_SXM = _later(132, 66.9, 494.7, 989.4, 1978.9)
_H100_NVL = _later(132, 60.0, 417.5, 835.5, 1670.5)
_H100_PCIE = _later(114, 51.2, 378.0, 756.0, 1513.0)
_A100 = _ampere(108, 19.5, 156.0, 312.0)
_MI300X = _later(304, 163.4, 653.7, 1307.4, 2614.9)

# By the words that a name must contain. If several fit, the one with the most words counts.
_SHEETS = {
    "V100 SXM2": DataSheet(80, 15.7, None, 125.0),
    "V100 SXM3": DataSheet(80, 15.7, None, 125.0),
    "V100 PCIE": DataSheet(80, 14.0, None, 112.0),
    "V100S PCIE": DataSheet(80, 16.4, None, 130.0),
    "T4": DataSheet(40, 8.1, None, 65.0),
    "A100": _A100,
    "A100 PCIe": _A100,
    "A800": _A100,
    "A800 PCIe": _A100,
    "A30": _ampere(56, 10.3, 82.0, 165.0),
    "A40": _ampere(84, 37.4, 74.8, 149.7),
    "A10": _ampere(72, 31.2, 62.5, 125.0),
    "A10G": _ampere(80, 35.0, 35.0, 70.0),
    "RTX A6000": _ampere(84, 38.7, 77.4, 154.8),
    "RTX A5000": _ampere(64, 27.8, 55.6, 111.1),
    "TITAN RTX": DataSheet(72, 16.3, None, 130.5),
    "GeForce RTX 2080 Ti": DataSheet(68, 14.2, None, 56.9),
    "GeForce RTX 3060": _ampere(28, 12.7, 12.7, 25.5),
    "GeForce RTX 3070": _ampere(46, 20.3, 20.3, 40.6),
    "GeForce RTX 3080": _ampere(68, 29.8, 29.8, 59.5),
    "GeForce RTX 3090": _ampere(82, 35.6, 35.6, 71.0),
    "GeForce RTX 3090 Ti": _ampere(84, 40.0, 40.0, 80.0),
    "L4": _later(58, 30.3, 60.0, 121.0, 242.5),
    "L20": _later(92, 59.8, 59.8, 119.5, 239.0),
    "L40": _later(142, 90.5, 90.5, 181.0, 362.0),
    "L40S": _later(142, 91.6, 183.0, 362.0, 733.0),
    "RTX 6000 Ada": _later(142, 91.1, 182.1, 364.2, 728.5),
    "GeForce RTX 4080": _later(76, 48.7, 48.7, 97.5, 194.9),
    "GeForce RTX 4090": _later(128, 82.6, 82.6, 165.2, 330.3),
    "GeForce RTX 4090 D": _later(114, 73.5, 73.5, 147.1, 294.2),
    "GeForce RTX 5090": _later(170, 104.8, 104.8, 209.5, 419.0),
    "H100": _H100_SXM,
    "H100 NVL": _H100_NVL,
    "H100 PCIe": _H100_PCIE,
    "H800": _H100_SXM,
    "H800 PCIe": _H100_PCIE,
    "H200": _H100_SXM,
    "H200 NVL": _H100_NVL,
    "GH200": _H100_SXM,
    "H20": _later(78, 44.0, 74.0, 148.0, 296.0),
    "B200": _later(148, 75.0, 1125.0, 2250.0, 4500.0),
    "GB200": _later(148, 80.0, 1250.0, 2500.0, 5000.0),
    "B300": _later(148, 75.0, 1125.0, 2250.0, 4500.0),
    "GB300": _later(148, 80.0, 1250.0, 2500.0, 5000.0),
    "Instinct MI300X": _MI300X,
    "Instinct MI325X": _MI300X,
    "Instinct MI350X": DataSheet(256, 144.2, None, 2309.6, 2309.6, 4614.0),
    "Instinct MI355X": DataSheet(256, 157.3, None, 2516.6, 2516.6, 5033.2),
}
# What makes another device of a name.
_FORMS = frozenset(("ti", "super"))
# Names of another form than the sheet's, and slices by time of a virtual GPU, such as `GRID A100-10C`.
_OTHERWISE = re.compile(r"laptop|mobile|max|grid|\d+[abcq]")


def sheet_of(name: str) -> DataSheet | None:
    """The data sheet of a device; None if none is known.

    >>> sheet_of("NVIDIA H100 NVL").bfloat16
    835.5
    >>> sheet_of("NVIDIA RTX A1000") is None
    True
    """
    found = sheet_name(name)
    return _SHEETS[found] if found else None


def sheet_name(name: str) -> str:
    """Returns the name of a device's data sheet; empty if none is known.

    >>> sheet_name("NVIDIA A100-PCIE-40GB")
    'A100 PCIe'
    """
    words = _words(name)
    if any(_OTHERWISE.fullmatch(word) for word in words):
        return ""
    fitting = [key for key in _SHEETS if _words(key) <= words and _FORMS & words <= _words(key)]
    return max(fitting, key=lambda key: len(_words(key)), default="")


def share_of(name: str, multiprocessors: int) -> float:
    """Returns the share of a device that a slice of it has (MIG); 1 for a whole or an unknown device."""
    sheet = sheet_of(name)
    return multiprocessors / sheet.multiprocessors if sheet is not None and "mig" in _words(name) else 1.0


def peak_flops(name: str, dtype: str, share: float) -> float | None:
    """Returns the most FLOP/s of a device's products of matrices; None if its data sheet is unknown or has no value.

    >>> peak_flops("NVIDIA L40", "bfloat16", 1.0)
    181000000000000.0
    """
    sheet = sheet_of(name)
    figures = {} if sheet is None else {each: getattr(sheet, each) for each in ("float32", "tf32", *HALVES, "float8")}
    teraflops = figures.get(dtype)
    return None if teraflops is None else teraflops * 1e12 * share


def multiplied_in(formats: Collection[str]) -> str | None:
    """Returns the type in which a training multiplies its matrices; None if its formats do not decide that.

    Under autocast, 32-bit weights are multiplied in fewer bits. No training uses both 16-bit types.

        >>> multiplied_in(["bfloat16", "float32"])
        'bfloat16'
    """
    if any(each.startswith("float8") for each in formats):
        return "float8"
    if "float64" in formats:
        return None
    halves = [each for each in HALVES if each in formats]
    if halves:
        return halves[0] if len(halves) == 1 else None
    return next((each for each in ("tf32", "float32") if each in formats), None)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", text.lower()))
