// MaxSim of ragged, quantised documents on CPUs; see `pipeline/search/native/__init__.py`.
//
// `maxray_score` scores a list of documents in the calling thread with the instruction set of a
// level.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

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

enum OneToken { ROWS_OF_QUERIES = 1, PANELS };
enum Kind { FLOAT32, FLOAT16, BFLOAT16, INT8, BITS, RESIDUAL };

// Arguments; they mirror `_GROUP` and the ctypes structures `_QueriesArgument`, `_Output` and
// `_Selection`.
struct Documents {
    int32_t kind, dim;
    int64_t row_bytes, total;   // bytes per vector; number of vectors in memory
    const void* values;
    const float* scales;        // int8: scale per vector
    const int32_t* codes;       // residual: centroid per vector
    const float* centroids;     // residual: centroids
    const float* weights;       // residual: value per bucket
    const uint16_t *half_scales, *projections;  // bits: float16 per vector
    int32_t bits, normalised;   // bits, residual: bits per dimension; residual: whether to scale
                                // to unit length
    const int64_t *starts, *lengths;  // first vector and number of vectors per document
    int64_t count;              // number of documents
};
struct Queries {
    const void* packed;     // panels of 32 tokens, in the layout for the level and the kind;
                            // one token per query: rows of int16 for int8 vectors, else of
                            // float32; or panels of int16
    const float* scales;    // int8 and bits: scale per token
    const float* offsets;   // bits: factor of the projections per token
    const int64_t* bounds;  // first token of each query, then the number of tokens
    int64_t count, tokens, padded;  // number of queries, of tokens, and of tokens with padding
    int64_t one_token;              // 0, or form of queries of one token: rows, or panels of int16
                                    // to select int8 documents of at most one vector
};
struct Output {
    float* scores;   // (queries, stride), or null
    int64_t stride;
    float* best;     // (documents, tokens) similarities, or null
    int32_t* index;  // (documents, tokens) indices of the best tokens in the document, or null
};
struct Found {
    float score;
    int32_t document;
};
struct Selection {      // documents whose scores reach the limits, in ascending order
    const float* limits;  // limit per query, finite; panels: infinite for padding
    Found* found;         // (queries, stride)
    int64_t stride;
    int64_t* counts;      // number of selected documents per query
    int64_t first;        // number of the first document
};
struct Cell {           // of an item, while the similarities of lists are added up
    float score;
    int32_t token;      // number of the last query token that found the item, from 1 on, or 0
};

namespace {

constexpr int64_t up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// Working memory of one call: 132 bytes per query token (264 with indices) and 256 per dimension.
struct Scratch {
    int width;  // width of a row: the dimension, rounded up to a multiple of 64
    float *floats, *products, *best;
    uint16_t *high, *low;  // decoded rows as pairs of bfloat16
    int32_t* index;

    Scratch(int dim, int64_t padded, bool argmax) : width(int(up(dim, 64))) {
        const int64_t half = 32 * 2 * width, maxima = 33 * 4 * padded;
        const int64_t total = 4 * half + 32 * 32 * 4 + maxima * (1 + argmax);
        memory = (char*)std::aligned_alloc(64, total);
        if (!memory) throw std::bad_alloc();
        // Values beyond the dimension of a row and beyond the last row must be zero.
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

// Returns whether the operating system saves these registers, which are bits of XCR0.
bool saves_state(uint64_t wanted) {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t(high) << 32 | low) & wanted) == wanted;
}

int find_level() {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return GENERIC;
    const bool fma = c & bit_FMA, f16c = c & bit_F16C;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return GENERIC;
    if (!(b & bit_AVX2) || !fma || !f16c || !saves_state(0x6)) return GENERIC;
    const uint32_t wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    if ((b & wide) != wide || !(c & (1u << 11)) || !saves_state(0xe6)) return AVX2;
    const uint32_t tiles = 1u << 24 | 1u << 25 | 1u << 22;  // AMX: tile, int8, bf16
    if ((d & tiles) != tiles || !saves_state(0x60000)) return AVX512;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & (1u << 5))) return AVX512;  // bf16
#if defined(__linux__)
    // A process must request the 8 KiB of tile state from the kernel.
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? AMX : AVX512;
#else
    return AVX512;
#endif
}
#else
int find_level() { return GENERIC; }
#endif

void score(const Documents& docs, const Queries& queries, const Output& output, Scratch& scratch,
           bool argmax, int level) {
#if X86
    if (level == AMX)
        return (argmax ? amx::score<true> : amx::score<false>)(docs, queries, output, scratch);
    if (level == AVX512)
        return (argmax ? avx512::score<true> : avx512::score<false>)(docs, queries, output, scratch);
    if (level == AVX2)
        return (argmax ? avx2::score<true> : avx2::score<false>)(docs, queries, output, scratch);
#endif
    (argmax ? generic::score<true> : generic::score<false>)(docs, queries, output, scratch);
}

// Calls a function with the part of each group that belongs to a run of documents.
template <class Function>
void for_each_part(const Documents* groups, int64_t num_groups, int64_t begin, int64_t end,
                   Function function) {
    for (const Documents* docs = groups; docs < groups + num_groups && end > 0; ++docs) {
        const int64_t from = std::max<int64_t>(begin, 0), to = std::min(end, docs->count);
        begin -= docs->count, end -= docs->count;
        if (from >= to) continue;
        Documents part = *docs;
        part.starts += from, part.lengths += from, part.count = to - from;
        function(part);
    }
}

// Number of documents that are scored before their scores are compared with the limits. The scores
// of 32 queries then stay in the L2 cache.
constexpr int64_t CHUNK = 1024;

// Appends the scores that reach the limit. Without a branch, since a few percent of them do.
int64_t append(const float* scores, int64_t count, float limit, int64_t first, Found* found) {
    int64_t num = 0;
    for (int64_t i = 0; i < count; ++i) {
        found[num] = {scores[i], int32_t(first + i)};
        num += scores[i] >= limit;
    }
    return num;
}

}  // namespace

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Returns the widest level of this machine: 0 generic, 1 AVX2, 2 AVX-512 with VNNI, 3 AMX.
EXPORT int maxray_level() {
    static const int level = find_level();
    return level;
}

// Scores the documents `begin` to `end` of all groups, whose results follow one another, with a level
// that the machine supports. Returns 0, or 1 if allocation fails.
EXPORT int maxray_score(const Documents* groups, int64_t num_groups, int64_t begin, int64_t end,
                        const Queries* queries, const Output* output, int level) {
    if (num_groups == 0) return 0;
    try {
        const bool argmax = output->best != nullptr;
        Scratch scratch(groups->dim, queries->padded, argmax);
        Output rest = *output;
        for_each_part(groups, num_groups, begin, end, [&](const Documents& docs) {
            score(docs, *queries, rest, scratch, argmax, level);
            if (rest.scores) rest.scores += docs.count;
            if (argmax) rest.best += docs.count * queries->tokens, rest.index += docs.count * queries->tokens;
        });
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// Scores documents like `maxray_score`, and selects those whose scores reach the limits. The
// selection has space for all documents.
EXPORT int maxray_select(const Documents* groups, int64_t num_groups, int64_t begin, int64_t end,
                         const Queries* queries, const Selection* selection, int level) {
    const int64_t count = queries->count, stride = selection->stride;
    std::fill_n(selection->counts, count, 0);
    if (num_groups == 0) return 0;
    try {
        Scratch scratch(groups->dim, queries->padded, false);
        std::vector<float> scores(count * CHUNK);
        int64_t first = selection->first;
        for_each_part(groups, num_groups, begin, end, [&](const Documents& docs) {
#if X86
            if (queries->one_token == PANELS) {
                (level == AVX2 ? avx2::select_one_vector : avx512::select_one_vector)(
                    docs, *queries, *selection, first, scratch);
                first += docs.count;
                return;
            }
#endif
            Documents chunk = docs;
            for (int64_t from = 0; from < docs.count; from += CHUNK, first += chunk.count) {
                chunk.starts = docs.starts + from, chunk.lengths = docs.lengths + from;
                chunk.count = std::min(CHUNK, docs.count - from);
                score(chunk, *queries, {scores.data(), CHUNK, nullptr, nullptr}, scratch, false, level);
                for (int64_t q = 0; q < count; ++q) {
                    int64_t& num = selection->counts[q];
                    num += append(scores.data() + q * CHUNK, chunk.count, selection->limits[q],
                                  first, selection->found + q * stride + num);
                }
            }
        });
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// Adds up the similarities of lists for their items, see `vote` in `__init__.py`.
//
// Without a branch per item. The next items, the cells of the next list and its start are
// prefetched, since all of them are at random places in memory.
EXPORT int64_t maxray_vote(const int32_t* items, const int64_t* bounds, const int64_t* lists,
                           const float* similarities, const float* missing, int64_t num_tokens,
                           int64_t num_lists, Cell* cells, int32_t* found, float* scores) {
    constexpr int64_t AHEAD = 24, LISTS = 4, LINES = 7;  // 7 lines of 64 bytes: 112 items
    const int64_t total = num_tokens * num_lists;
    int64_t num_found = 0;
    for (int64_t at = 0; at < total; ++at) {
        if (at + 2 * LISTS < total) __builtin_prefetch(bounds + lists[at + 2 * LISTS]);
        if (at + LISTS < total) {
            const int32_t* later = items + bounds[lists[at + LISTS]];
            for (int64_t line = 0; line < LINES; ++line) __builtin_prefetch(later + 16 * line);
        }
        const int32_t token = int32_t(at / num_lists + 1);
        const float added = similarities[at] - missing[token - 1];
        auto add = [&](int32_t item) {
            Cell& cell = cells[item];
            found[num_found] = item;
            num_found += cell.token == 0;
            cell.score += cell.token == token ? 0.0f : added;
            cell.token = token;
        };
        const int32_t* item = items + bounds[lists[at]];
        const int32_t* end = items + bounds[lists[at] + 1];
        const int32_t* next = at + 1 < total ? items + bounds[lists[at + 1]] : item;
        for (; item + AHEAD < end; ++item) {
            __builtin_prefetch(cells + item[AHEAD]);
            add(*item);
        }
        for (; item < end; ++item) {
            __builtin_prefetch(cells + *next++);
            add(*item);
        }
    }
    for (int64_t i = 0; i < num_found; ++i) {
        if (i + AHEAD < num_found) __builtin_prefetch(cells + found[i + AHEAD]);
        scores[i] = std::exchange(cells[found[i]], {}).score;
    }
    return num_found;
}
