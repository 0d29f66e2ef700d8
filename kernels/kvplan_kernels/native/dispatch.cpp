// The C interface: checks what leads outside, and picks the variant that this machine runs.
#include <stddef.h>
#include <string.h>

#include "plan.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The build says which variants its compiler knew: KVPLAN_BUILT(X) is X(name) for each.
#define DECLARE(name)                                                                                                  \
  namespace name {                                                                                                     \
  extern const kvplan_kernels kernels;                                                                                 \
  }
KVPLAN_BUILT(DECLARE)

namespace {

struct Variant {
  const char *name;
  const kvplan_kernels *kernels;
};

#define ROW(name) {#name, &name::kernels},
constexpr Variant BUILT[] = {KVPLAN_BUILT(ROW)};
constexpr int BUILT_COUNT = sizeof(BUILT) / sizeof(BUILT[0]);

#ifdef __x86_64__
// Asked of the processor: compilers know these two by name later than their instructions. AVX2 says that the system keeps
// the registers.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}

bool has_avx512_bf16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
}

// Whether there are AMX tiles for int8 and bf16, and the kernel lets this process have them.
bool tiles_granted() {
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, WANTED = BF16 | TILE | INT8;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & WANTED) != WANTED) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

// The variants that were built and that this machine runs, the preferred one first.
struct Variants {
  Variant found[BUILT_COUNT];
  int count;

  void add(const char *name) {
    for (const Variant &variant : BUILT)
      if (!strcmp(variant.name, name)) found[count++] = variant;
  }

  Variants() : count(0) {
#ifdef __x86_64__
    __builtin_cpu_init();
    const bool vnni = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
    const bool bf16 = vnni && has_avx512_bf16();
    // BF16 dot products run once a cycle on Zen 4 and once in four on Sapphire Rapids, where two multiply-adds win.
    const bool first = __builtin_cpu_is("amd");
    if (bf16 && tiles_granted()) add("avx512_amx");
    if (bf16 && first) add("avx512_vnni_bf16");
    if (vnni) add("avx512_vnni");
    if (bf16 && !first) add("avx512_vnni_bf16");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
      add("avx2");
#endif
    add("portable");
  }
};

const Variants &variants() {
  static const Variants known;
  return known;
}

bool same_version(const kvplan_layout *l) {
  return l->abi_version == KVPLAN_ABI_VERSION && l->struct_bytes == (int32_t)sizeof(kvplan_layout);
}

const kvplan_kernels &chosen(int32_t variant) {
  const Variants &v = variants();
  return *v.found[variant >= 0 && variant < v.count ? variant : 0].kernels;
}

bool distinct_slots(const kvplan_batch &b) {
  for (int32_t i = 0; i < b.sequences; i++)
    for (int32_t j = 0; j < i; j++)
      if (b.slot_ids[i] == b.slot_ids[j]) return false;
  return true;
}

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int32_t kvplan_abi_version() { return KVPLAN_ABI_VERSION; }

EXPORT const char *kvplan_variant_name(int32_t index) {
  const Variants &v = variants();
  return index >= 0 && index < v.count ? v.found[index].name : nullptr;
}

EXPORT int64_t kvplan_append(const kvplan_layout *l, const kvplan_batch *b, const kvplan_append_call *c) {
  if (!same_version(l)) return -1;
  if (!kvplan_inside(*l, *b, c->counts) || !distinct_slots(*b)) return -2;
  return chosen(c->variant).append(*l, *b, *c);
}

EXPORT int64_t kvplan_decode(const kvplan_layout *l, const kvplan_batch *b, const kvplan_decode_call *c) {
  if (!same_version(l)) return -1;
  if (!kvplan_inside(*l, *b, nullptr)) return -2;
  return chosen(c->variant).decode(*l, *b, *c);
}

EXPORT int64_t kvplan_dequantize(const kvplan_layout *l, const kvplan_batch *b, const kvplan_dequantize_call *c) {
  if (!same_version(l)) return -1;
  if (!kvplan_inside(*l, *b, nullptr)) return -2;
  return chosen(c->variant).dequantize(*l, *b, *c);
}

EXPORT int64_t kvplan_read(const void *data, int64_t bytes, int32_t threads, int32_t variant) {
  return chosen(variant).read(data, bytes, threads);
}

EXPORT int64_t kvplan_rotate(float *values, int64_t rows, int32_t dim, int32_t threads, int32_t variant) {
  if (dim < 8 || dim % 8) return -2;
  return chosen(variant).rotate(values, rows, dim, threads);
}
