// Root-mean-square normalisation: riftco/kernels/rms_norm/spec.py says what it means.
#include <metal_stdlib>
using namespace metal;
#include "norm.h"

INSTANTIATE_ROWS("rms_norm", "f32_f32", float, float, false)
INSTANTIATE_ROWS("rms_norm", "f16_f16", half, half, false)
INSTANTIATE_ROWS("rms_norm", "f16_f32", half, float, false)
INSTANTIATE_ROWS("rms_norm", "bf16_bf16", bfloat, bfloat, false)
INSTANTIATE_ROWS("rms_norm", "bf16_f32", bfloat, float, false)
INSTANTIATE_COLUMNS("rms_norm", "f32", float, false)
INSTANTIATE_COLUMNS("rms_norm", "f16", half, false)
INSTANTIATE_COLUMNS("rms_norm", "bf16", bfloat, false)
