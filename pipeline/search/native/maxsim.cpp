// MaxSim of ragged, quantised documents on a CPU: see `pipeline/search/native/__init__.py`.
//
// One function scores a list of documents in the calling thread, with the widest instructions that
// the machine has and that the caller allows.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#define GENERIC 0
#define AVX2 1
#define AVX512 2
#define AMX 3

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define X86 0
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum Kind { FLOAT32, FLOAT16, BFLOAT16, INT8, BINARY, RESIDUAL };

// Everything the Python side fills in; the order of the fields is that of `_Documents` there.
struct Documents {
    int32_t kind, dim;
    int64_t row_bytes, total;   // of one vector; vectors in the memory
    const void* values;
    const float* scales;        // int8: one a vector
    const int32_t* codes;       // residual: the centroid of each vector,
    const float* centroids;     // all centroids,
    const float* weights;       // what the buckets stand for,
    int32_t bits, normalised;   // bits a number, and whether vectors are brought to unit length
    const int64_t *starts, *lengths;  // of the documents to be scored
    int64_t count;
};
struct Queries {
    const void* packed;     // panels of 32 tokens, as the level and the kind want them
    const float* scales;    // int8: one a token
    const int64_t* bounds;  // where each query's tokens begin, and the last end
    int64_t count, tokens, padded;
};
struct Output {
    float* scores;   // (queries, stride), or null
    int64_t stride;
    float* best;     // (documents, tokens) similarities and
    int32_t* index;  // places in the document, or null
};

namespace {

constexpr int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Working memory of one call: 132 bytes a query token (264 with places), 256 a dimension.
struct Scratch {
    int width;  // of a row: the dimension, up to a multiple of 64
    float *floats, *products, *best;
    uint16_t *high, *low;  // beside floats: pairs of bfloat16
    int32_t* index;

    Scratch(int dim, int64_t padded, bool argmax) : width(int(up(dim, 64))) {
        const int64_t half = 32 * 2 * width, maxima = 33 * 4 * padded;
        const int64_t total = 4 * half + 32 * 32 * 4 + maxima * (1 + argmax);
        memory = (char*)std::aligned_alloc(64, total);
        if (!memory) throw std::bad_alloc();
        // What lies behind a row's dimension, and behind the last row, counts as zero.
        memset(memory, 0, total);
        char* at = memory;
        auto take = [&](int64_t size) { return std::exchange(at, at + size); };
        floats = (float*)take(2 * half);
        high = (uint16_t*)take(half);
        low = (uint16_t*)take(half);
        products = (float*)take(32 * 32 * 4);
        best = (float*)take(maxima);
        index = (int32_t*)(argmax ? take(maxima) : nullptr);
    }
    ~Scratch() { std::free(memory); }
    Scratch(const Scratch&) = delete;

private:
    char* memory;
};

namespace generic {
#define LEVEL GENERIC
#include "body.h"
#undef LEVEL
}  // namespace generic

#if X86

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define LEVEL AVX2
#include "body.h"
#undef LEVEL
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
namespace avx512 {
#define LEVEL AVX512
#include "body.h"
#undef LEVEL
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target( \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16")
namespace amx {
#define LEVEL AMX
#include "body.h"
#undef LEVEL
}  // namespace amx
#pragma GCC pop_options

// Whether the operating system keeps these registers: bits of XCR0.
bool keeps(uint64_t wanted) {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t(high) << 32 | low) & wanted) == wanted;
}

int find_level() {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return GENERIC;
    const bool fma = c & bit_FMA, f16c = c & bit_F16C;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return GENERIC;
    if (!(b & bit_AVX2) || !fma || !f16c || !keeps(0x6)) return GENERIC;
    const uint32_t wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if ((b & wide) != wide || !(c & (1u << 11)) || !keeps(0xe6)) return AVX2;
    const uint32_t tiles = 1u << 24 | 1u << 25 | 1u << 22;  // AMX: tile, int8, bf16
    if ((d & tiles) != tiles || !keeps(0x60000)) return AVX512;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & (1u << 5))) return AVX512;  // bf16
#if defined(__linux__)
    // The kernel gives the tiles' 8 KiB of state to a process that asks for it.
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? AMX : AVX512;
#else
    return AVX512;
#endif
}
#else
int find_level() { return GENERIC; }
#endif

}  // namespace

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The widest instructions of this machine: 0 any, 1 AVX2, 2 AVX-512 with VNNI, 3 AMX.
EXPORT int maxray_level() {
    static const int level = find_level();
    return level;
}

// Scores the documents with the instructions of a level that the machine has; 0, or 1 for no memory.
EXPORT int maxray_score(const Documents* docs, const Queries* queries, const Output* output, int level) {
    try {
        Scratch scratch(docs->dim, queries->padded, output->best != nullptr);
        const bool argmax = output->best != nullptr;
#if X86
        if (level == AMX)
            (argmax ? amx::score<true> : amx::score<false>)(*docs, *queries, *output, scratch);
        else if (level == AVX512)
            (argmax ? avx512::score<true> : avx512::score<false>)(*docs, *queries, *output, scratch);
        else if (level == AVX2)
            (argmax ? avx2::score<true> : avx2::score<false>)(*docs, *queries, *output, scratch);
        else
#endif
            (argmax ? generic::score<true> : generic::score<false>)(
                *docs, *queries, *output, scratch);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
