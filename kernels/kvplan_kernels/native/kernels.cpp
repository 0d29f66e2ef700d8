// The kernels of one variant. The build compiles this file once per instruction set, with KVPLAN_ISA naming it.
// Nothing here may be shared between variants by the linker, hence the inner namespace and no standard C++ headers.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(KVPLAN_AVX512) || defined(KVPLAN_AVX2)
#include <immintrin.h>
#endif

#include "plan.h"

#ifdef _OPENMP
extern "C" int omp_get_thread_num();
#else
static inline int omp_get_thread_num() { return 0; }
#endif

#define INLINE inline __attribute__((always_inline))

namespace KVPLAN_ISA {
namespace {

#if defined(KVPLAN_AVX512)
#include "simd_avx512.h"
#elif defined(KVPLAN_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif
#include "vectors.h"

#include "stored.h"

#include "boosts.h"
#include "outliers.h"

#include "rotate.h"

#include "append.h"

#include "dequantize.h"

#include "decode.h"

#include "read.h"

} // namespace

extern const kvplan_kernels kernels;
const kvplan_kernels kernels = {append, decode, dequantize, read_bytes, rotate_rows};

} // namespace KVPLAN_ISA
