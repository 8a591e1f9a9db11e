// MaxSim kernels, compiled once per instruction set.
//
// maxsim.cpp includes this file in one namespace per LEVEL, which is GENERIC (any machine),
// AVX2 (with FMA and F16C), AVX512 (with VNNI) or AMX (with int8 and bf16).
//
// A block consists of up to 32 rows, which are contiguous tokens of one or several documents. It is
// multiplied by all query tokens in panels of 32, and the running maxima of a document are kept
// until its last row. Rows are not padded, and nothing larger than a block leaves the cache.

// Vector types of this level, and the number of vectors per row of a panel's products.
constexpr int LANES = LEVEL >= AVX512 ? 16 : LEVEL >= AVX2 ? 8 : 4, PARTS = 32 / LANES;
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));

static inline floats splat(float x) { return floats{} + x; }

// -- rows as float32 ------------------------------------------------------------------------------

static inline float half_bits(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | ((rest & 0x3ff) << 13);
    } else {
        // Shifting and scaling by 2^112 is correct for subnormal values too.
        bits = rest << 13;
        float x;
        memcpy(&x, &bits, 4);
        x *= 0x1p112f;
        memcpy(&bits, &x, 4);
        bits |= sign;
    }
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline void decode_half(const uint16_t* in, int dim, float* out) {
    int d = 0;
#if LEVEL >= AVX512
    for (; d + 16 <= dim; d += 16)
        _mm512_storeu_ps(out + d, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(in + d))));
#elif LEVEL >= AVX2
    for (; d + 8 <= dim; d += 8)
        _mm256_storeu_ps(out + d, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(in + d))));
#endif
    for (; d < dim; ++d) out[d] = half_bits(in[d]);
}

static inline void decode_bfloat(const uint16_t* in, int dim, float* out) {
    for (int d = 0; d < dim; ++d) {
        uint32_t bits = uint32_t(in[d]) << 16;
        memcpy(out + d, &bits, 4);
    }
}

static inline void decode_int8(const int8_t* in, int dim, float* out) {
    for (int d = 0; d < dim; ++d) out[d] = in[d];
}

// Expands the codes of a row to the integers 2 code - (2^bits - 1), or 2 code if unsigned. The order is that of the bit
// positions: first the lowest code of every byte, then the next one. Queries are packed in the same
// order, because no byte has to move. One bit is a mask with AVX-512, so that the order is that of the
// dimensions. Values beyond the last dimension are arbitrary, because the query is zero there.
template <class Value>
static inline void expand(const Documents& docs, int64_t row, Value* out) {
    typedef uint8_t bytes __attribute__((vector_size(16)));
    typedef int8_t signed_bytes __attribute__((vector_size(16)));
    typedef Value values __attribute__((vector_size(16 * sizeof(Value))));
    const int64_t size = docs.row_bytes;
    const uint8_t* in = (const uint8_t*)docs.values + row * size;
    const int bits = docs.bits, mask = (1 << bits) - 1, top = Value(-1) < 0 ? mask : 0;
#if LEVEL >= AVX512
    if (bits == 1 && sizeof(Value) == 1) {
        const __m512i low = _mm512_set1_epi8(char(-top)), high = _mm512_set1_epi8(char(2 - top));
        for (int64_t i = 0; i < size; i += 8) {
            uint64_t ones = 0;
            memcpy(&ones, in + i, std::min<int64_t>(8, size - i));
            _mm512_storeu_si512(out + 8 * i, _mm512_mask_blend_epi8(ones, low, high));
        }
        return;
    }
#endif
    for (int shift = 0; shift < 8; shift += bits, out += size) {
        int64_t i = 0;
        for (; i + 16 <= size; i += 16) {
            bytes codes;
            memcpy(&codes, in + i, 16);
            codes = (codes >> uint8_t(shift)) & uint8_t(mask);
            codes += codes - uint8_t(top);
            const values x = __builtin_convertvector((signed_bytes)codes, values);
            memcpy(out + i, &x, sizeof(x));
        }
        for (; i < size; ++i) out[i] = Value(2 * ((in[i] >> shift) & mask) - top);
    }
}

// Decodes a residual row with 2 or 4 bits per dimension; returns its scale, the inverse norm or 1.
static inline float decode_residual(const Documents& docs, int64_t row, int dim, float* out) {
    const uint8_t* in = (const uint8_t*)docs.values + row * docs.row_bytes;
    const float* centroid = docs.centroids + int64_t(docs.codes[row]) * dim;
    int d = 0;
#if LEVEL >= AVX512
    float table[16] = {};
    memcpy(table, docs.weights, sizeof(float) << docs.bits);
    const __m512 weights = _mm512_loadu_ps(table);
    const __m512i shifts =
        docs.bits == 4 ? _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0)
                       : _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i mask = _mm512_set1_epi32((1 << docs.bits) - 1);
    __m512 square = _mm512_setzero_ps();
    for (; d + 16 <= dim; d += 16) {
        __m512i word;
        if (docs.bits == 4) {
            int64_t packed;
            memcpy(&packed, in + d / 2, 8);
            const __m512i low = _mm512_set1_epi32(int32_t(packed));
            word = _mm512_mask_set1_epi32(low, 0xff00, int32_t(packed >> 32));
        } else {
            int32_t packed;
            memcpy(&packed, in + d / 4, 4);
            word = _mm512_set1_epi32(packed);
        }
        const __m512i bucket = _mm512_and_si512(_mm512_srlv_epi32(word, shifts), mask);
        const __m512 x =
            _mm512_add_ps(_mm512_loadu_ps(centroid + d), _mm512_permutexvar_ps(bucket, weights));
        square = _mm512_fmadd_ps(x, x, square);
        _mm512_storeu_ps(out + d, x);
    }
    float sum = _mm512_reduce_add_ps(square);
#else
    float sum = 0;
#endif
    const int per_byte = 8 / docs.bits, last = (1 << docs.bits) - 1;
    for (; d < dim; ++d) {
        out[d] = centroid[d] + docs.weights[(in[d / per_byte] >> (d % per_byte * docs.bits)) & last];
        sum += out[d] * out[d];
    }
    return docs.normalised && sum > 0 ? 1.0f / std::sqrt(sum) : 1.0f;
}

struct Half {
    uint16_t bits;
};
struct Bfloat {
    uint16_t bits;
};

// Returns up to `count` values of a row as float32, in `buffer` if they are converted.
static inline const float* widen(const float* row, int, float*) { return row; }
static inline const float* widen(const Half* row, int count, float* buffer) {
    decode_half((const uint16_t*)row, count, buffer);
    return buffer;
}
static inline const float* widen(const Bfloat* row, int count, float* buffer) {
    decode_bfloat((const uint16_t*)row, count, buffer);
    return buffer;
}

// -- blocks of decoded rows ------------------------------------------------------------------------

struct Span {  // range of rows of a block that belong to one document
    int first, last;
    int64_t row_in_document;
};

struct Block {
    int64_t first;  // index of the first row in the segment
    int rows;
    Span spans[32];
    int num_spans;
    int64_t document, next;  // range of documents that end in this block
    int64_t done_rows;       // rows of document `next` up to the end of this block
    bool open;               // whether the first span continues a document of the previous block
    const int8_t* bytes;     // int8 rows in place, or a copy near the end of the memory
    int64_t stride;
    const float* scales;  // scale per row; null if all are 1
    float scale_buffer[32];
    float projections[32];  // bits: projection per row
};

// Converts the scales and projections of the rows of a block.
static inline void load_factors(const Documents& docs, Block& block) {
    decode_half(docs.half_scales + block.first, block.rows, block.scale_buffer);
    decode_half(docs.projections + block.first, block.rows, block.projections);
    block.scales = block.scale_buffer;
}
#if LEVEL >= AVX512
// Number of blocks after which contiguous rows are prefetched.
constexpr int BLOCKS_AHEAD = LEVEL >= AMX ? 8 : 2;

// Rows of a later block are prefetched a few cache lines at a time during the products, because
// prefetching them at once would delay the loads of the current block. Prefetching past the end of
// the memory has no effect.
static inline void prefetch_lines(const char*& ahead, int count) {
    if (!ahead) return;
    for (int line = 0; line < count; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T0);
}
#endif

#if LEVEL >= AMX
// Splits the values of two registers into pairs of bfloat16, x = high + low, and interleaves the
// registers. Interleaving avoids shuffles; queries are packed in the same order. Both halves are
// rounded, except low if EXACT, because it is exact for float16 values.
template <bool EXACT>
static inline void split(__m512 a, __m512 b, uint16_t* high, uint16_t* low) {
    const __m512i upper = _mm512_set1_epi32(int(0xffff0000)), half = _mm512_set1_epi32(0x8000);
    const __m512i a_high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(a), half), upper);
    const __m512i b_high = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(b), half), upper);
    __m512i a_low = _mm512_castps_si512(_mm512_sub_ps(a, _mm512_castsi512_ps(a_high)));
    __m512i b_low = _mm512_castps_si512(_mm512_sub_ps(b, _mm512_castsi512_ps(b_high)));
    if (!EXACT) {
        a_low = _mm512_add_epi32(a_low, half);
        b_low = _mm512_add_epi32(b_low, half);
    }
    _mm512_store_si512(high, _mm512_or_si512(_mm512_srli_epi32(a_high, 16), b_high));
    // (a_low >> 16) | (b_low & upper)
    _mm512_store_si512(
        low, _mm512_ternarylogic_epi32(_mm512_srli_epi32(a_low, 16), b_low, upper, 0xf8));
}

static inline void split_half(const uint16_t* in, int dim, int width, uint16_t* high, uint16_t* low) {
    int d = 0;
    for (; d + 32 <= dim; d += 32)
        split<true>(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(in + d))),
              _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(in + d + 16))), high + d, low + d);
    for (; d < width; d += 32) {
        uint16_t rest[32] = {};
        if (d < dim) memcpy(rest, in + d, 2 * (dim - d));
        split<true>(_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)rest)),
              _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(rest + 16))), high + d, low + d);
    }
}

// Decodes rows to pairs of bfloat16, with stride `width`.
static void decode_pairs(const Documents& docs, Block& block, Scratch& s) {
    const int dim = docs.dim, width = s.width;
    block.scales = docs.kind == RESIDUAL ? block.scale_buffer : nullptr;
    for (int r = 0; r < block.rows; ++r) {
        const int64_t row = block.first + r;
        const uint8_t* in = (const uint8_t*)docs.values + row * docs.row_bytes;
        uint16_t *high = s.high + r * width, *low = s.low + r * width;
        switch (docs.kind) {
            case FLOAT16: split_half((const uint16_t*)in, dim, width, high, low); break;
            case BFLOAT16: memcpy(high, in, 2 * dim); break;
            default:
                block.scale_buffer[r] = decode_residual(docs, row, dim, s.floats);  // zero-padded
                for (int d = 0; d < width; d += 32)
                    split<false>(_mm512_load_ps(s.floats + d), _mm512_load_ps(s.floats + d + 16), high + d,
                          low + d);
        }
    }
}

static void start_tiles() {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) config.bytes[t] = 64, config.rows[t] = 16;
    _tile_loadconfig(&config);
}

// Tiles 0-3 contain the products of 2 x 16 rows and 2 x 16 query tokens.
static inline void store_products(int rows, float* out) {
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 16, 128);
    if (rows > 16) {
        _tile_stored(2, out + 16 * 32, 128);
        _tile_stored(3, out + 16 * 32 + 16, 128);
    }
}

static inline void multiply_int8(
    const Block& block, const int8_t* panel, int steps, const char* ahead) {
    const bool two = block.rows > 16;
    const int8_t *a = block.bytes, *a2 = a + 16 * block.stride;
    const int8_t* panel2 = panel + steps * 1024;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < steps; ++k) {
        _tile_loadd(4, a + k * 64, block.stride);
        _tile_loadd(6, panel + k * 1024, 64);
        _tile_loadd(7, panel2 + k * 1024, 64);
        _tile_dpbssd(0, 4, 6);
        prefetch_lines(ahead, 8);
        _tile_dpbssd(1, 4, 7);
        prefetch_lines(ahead, 8);
        if (two) {
            _tile_loadd(5, a2 + k * 64, block.stride);
            prefetch_lines(ahead, 8);
            _tile_dpbssd(2, 5, 6);
            prefetch_lines(ahead, 8);
            _tile_dpbssd(3, 5, 7);
        }
    }
}

// Computes high x high + high x low + low x high; the omitted term is 2^-18 of a product. Rows that
// are exactly their high part (`exact`) are multiplied by the three parts of the queries instead,
// which are exactly their float32 values.
static inline void multiply_pairs(
    const Scratch& s, int num_rows, const uint16_t* panel, int64_t low_at, bool exact) {
    const int width = s.width;
    const bool two = num_rows > 16;
    const int steps = width / 32;
    const int64_t stride = width * 2;
    const uint16_t* panel2 = panel + steps * 512;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < steps; ++k) {
        _tile_loadd(4, s.high + k * 32, stride);
        if (two) _tile_loadd(5, s.high + 16 * width + k * 32, stride);
        for (int low = 0; low < (exact ? 3 : 2); ++low) {
            _tile_loadd(6, panel + low * low_at + k * 512, 64);
            _tile_loadd(7, panel2 + low * low_at + k * 512, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (two) {
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        if (exact) continue;
        _tile_loadd(4, s.low + k * 32, stride);
        _tile_loadd(6, panel + k * 512, 64);
        _tile_loadd(7, panel2 + k * 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, s.low + 16 * width + k * 32, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}
#elif LEVEL >= AVX512
// The instruction requires one unsigned operand, so rows are unsigned: 128 is added to those of int8,
// and those of bits are 2 code (`expand`). `offsets` are the products with what was added, negated.
// HALVES is 1 if the second half of the panel is padding, whose products are arbitrary.
template <int HALVES>
static inline void multiply_int8(const Block& block, const int8_t* panel, const int32_t* offsets,
                                 int steps, const char* ahead, float* out) {
    constexpr int ROWS = 8 / HALVES;
    const int words = steps * 16;
    for (int r = 0; r < block.rows; r += ROWS) {
        __m512i sums[ROWS][HALVES];
        for (int i = 0; i < ROWS; ++i)
            for (int half = 0; half < HALVES; ++half)
                sums[i][half] = _mm512_loadu_si512(offsets + half * 16);
        for (int k = 0; k < words; ++k) {
            if (k % 4 == 0) prefetch_lines(ahead, ROWS / 4);
            __m512i query[HALVES];
            for (int half = 0; half < HALVES; ++half)
                query[half] = _mm512_loadu_si512(panel + (half * steps * 16 + k) * 64);
            for (int i = 0; i < ROWS; ++i) {
                int32_t four;
                memcpy(&four, block.bytes + (r + i) * block.stride + k * 4, 4);
                const __m512i doc = _mm512_set1_epi32(four);
                for (int half = 0; half < HALVES; ++half)
                    sums[i][half] = _mm512_dpbusd_epi32(sums[i][half], doc, query[half]);
            }
        }
        for (int i = 0; i < ROWS; ++i)
            for (int half = 0; half < HALVES; ++half)
                _mm512_storeu_si512(out + (r + i) * 32 + half * 16, sums[i][half]);
    }
}

// Copies a row and adds 128 to its bytes. Those beyond the last dimension are arbitrary, because
// the query is zero there.
static inline void offset_int8(const int8_t* in, int dim, int8_t* out) {
    const __m512i offset = _mm512_set1_epi8(char(128));
    for (int d = 0; d < dim; d += 64) {
        const __mmask64 mask = dim - d < 64 ? (1ull << (dim - d)) - 1 : ~0ull;
        _mm512_store_si512(out + d, _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, in + d), offset));
    }
}
#endif

#if LEVEL >= AVX2
// Widens an int8 row to int16.
static inline void widen_int8(const int8_t* in, int dim, int16_t* out) {
    int d = 0;
#if LEVEL >= AVX512
    for (; d + 32 <= dim; d += 32)
        _mm512_store_si512(
            out + d, _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(in + d))));
#else
    for (; d + 16 <= dim; d += 16)
        _mm256_store_si256(
            (__m256i*)(out + d), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(in + d))));
#endif
    for (; d < dim; ++d) out[d] = in[d];
}

// Multiplies rows that were widened to int16 with stride `width`. Pairs of dimensions are multiplied
// at once: with AVX2, an item of 32 vectors of 128 dimensions takes 2.8 us for 32 query tokens, and
// 4.8 us with float32. The sums of the rows of a step occupy half of the registers. The products with
// tokens beyond the first NUM_PARTS vectors of the panel are arbitrary.
template <int NUM_PARTS = PARTS>
static inline void multiply_int16(const Scratch& s, int num_rows, const int16_t* panel, float* out) {
    constexpr int ROWS = (LEVEL >= AVX512 ? 4 : 2) * PARTS / NUM_PARTS;
    const int16_t* rows = (const int16_t*)s.floats;
    for (int r = 0; r < num_rows; r += ROWS) {
        integers sums[ROWS][NUM_PARTS] = {};
        for (int d = 0; d < s.width; d += 2) {
            const integers* query = (const integers*)(panel + d * 32);
            for (int i = 0; i < ROWS; ++i) {
                int32_t pair;
                memcpy(&pair, rows + (r + i) * s.width + d, 4);
                const integers x = integers{} + pair;
                for (int p = 0; p < NUM_PARTS; ++p)
#if LEVEL >= AVX512
                    sums[i][p] = (integers)_mm512_dpwssd_epi32(
                        (__m512i)sums[i][p], (__m512i)x, _mm512_loadu_si512(query + p));
#else
                    sums[i][p] += (integers)_mm256_madd_epi16(
                        (__m256i)x, _mm256_loadu_si256((const __m256i*)query + p));
#endif
            }
        }
        for (int i = 0; i < ROWS; ++i) memcpy(out + (r + i) * 32, sums[i], sizeof(sums[i]));
    }
}
#endif

#if LEVEL < AMX
// Decodes rows to float32 with stride `width`; values beyond the last dimension and row are zero.
static void decode(const Documents& docs, Block& block, Scratch& s) {
    const int dim = docs.dim, width = s.width;
    block.scales = docs.kind == INT8 || docs.kind == RESIDUAL ? block.scale_buffer : nullptr;
    if (docs.kind == BITS) load_factors(docs, block);
    for (int r = 0; r < block.rows; ++r) {
        const int64_t row = block.first + r;
        const uint8_t* in = (const uint8_t*)docs.values + row * docs.row_bytes;
        float* out = s.floats + r * width;
        switch (docs.kind) {
            case FLOAT32: memcpy(out, in, sizeof(float) * dim); break;
            case FLOAT16: decode_half((const uint16_t*)in, dim, out); break;
            case BFLOAT16: decode_bfloat((const uint16_t*)in, dim, out); break;
            case INT8: decode_int8((const int8_t*)in, dim, out); block.scale_buffer[r] = docs.scales[row]; break;
            case BITS: expand(docs, row, out); break;
            default: block.scale_buffer[r] = decode_residual(docs, row, dim, out);
        }
    }
}

// Number of rows per step, whose sums occupy half of the registers.
constexpr int ROWS = LEVEL >= AVX512 ? 8 : LEVEL >= AVX2 ? 2 : 1;

static inline void multiply_float(const Scratch& s, int num_rows, const float* panel, float* out) {
    const float* rows = s.floats;
    const int width = s.width;
    for (int r = 0; r < num_rows; r += ROWS) {
        floats sums[ROWS][PARTS] = {};
        for (int d = 0; d < width; ++d) {
            const floats* query = (const floats*)(panel + d * 32);
            for (int i = 0; i < ROWS; ++i) {
                const floats x = splat(rows[(r + i) * width + d]);
                for (int p = 0; p < PARTS; ++p) sums[i][p] += x * query[p];
            }
        }
        memcpy(out + r * 32, sums, sizeof(sums));
    }
}
#endif

// -- maxima ---------------------------------------------------------------------------------------

static inline floats larger(floats a, floats b) {
#if LEVEL >= AVX512
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// `offsets` are the factors of the projections for the tokens of the panel, or null.
template <bool INTEGERS, bool ARGMAX>
static inline void take_maxima(
    const float* products, const float* offsets, const Block& block, const Span& span, bool open,
    float* best, int32_t* index) {
    floats maxima[PARTS];
    integers position[PARTS];
    for (int p = 0; p < PARTS; ++p) {
        maxima[p] = open ? *(floats*)(best + p * LANES) : splat(LOWEST);
        if (ARGMAX) position[p] = open ? *(integers*)(index + p * LANES) : integers{} - 1;
    }
    for (int r = span.first; r < span.last; ++r) {
        const floats scale = splat(block.scales ? block.scales[r] : 1);
        const integers row_index = integers{} + int32_t(span.row_in_document + r - span.first);
        for (int p = 0; p < PARTS; ++p) {
            const float* at = products + r * 32 + p * LANES;
            floats x = INTEGERS ? __builtin_convertvector(*(const integers*)at, floats)
                                : *(const floats*)at;
            if (INTEGERS || block.scales) x *= scale;
            if (offsets) x += block.projections[r] * *(const floats*)(offsets + p * LANES);
            if (ARGMAX) position[p] = x > maxima[p] ? row_index : position[p];
            maxima[p] = larger(x, maxima[p]);
        }
    }
    memcpy(best, maxima, sizeof(maxima));
    if (ARGMAX) memcpy(index, position, sizeof(position));
}

static inline float sum_values(const float* values, int64_t count) {
    floats sums = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        floats x;
        memcpy(&x, values + i, sizeof(x));
        sums += x;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
    for (; i < count; ++i) sum += values[i];
    return sum;
}

static void write(
    const Queries& queries, const Output& output, int64_t document, float* best, int32_t* index) {
    if (queries.scales)
        for (int64_t i = 0; i < queries.padded; ++i) best[i] *= queries.scales[i];
    for (int64_t q = 0; output.scores && q < queries.count; ++q)
        output.scores[q * output.stride + document] =
            sum_values(best + queries.bounds[q], queries.bounds[q + 1] - queries.bounds[q]);
    if (output.best) {
        memcpy(output.best + document * queries.tokens, best, sizeof(float) * queries.tokens);
        memcpy(output.index + document * queries.tokens, index, sizeof(int32_t) * queries.tokens);
    }
}

static void write_empty(const Queries& queries, const Output& output, int64_t document) {
    for (int64_t q = 0; output.scores && q < queries.count; ++q)
        output.scores[q * output.stride + document] = LOWEST;
    for (int64_t i = 0; output.best && i < queries.tokens; ++i) {
        output.best[document * queries.tokens + i] = LOWEST;
        output.index[document * queries.tokens + i] = -1;
    }
}

// Writes the documents that end in a block. The maxima of a document that continues in the next
// block are moved to the front.
template <bool ARGMAX>
static void finish(
    const Documents& docs, const Queries& queries, const Output& output, const Block& block,
    Scratch& s) {
    int64_t slot = 0;
    for (int64_t document = block.document; document < block.next; ++document) {
        if (docs.lengths[document] == 0) {
            write_empty(queries, output, document);
            continue;
        }
        const int64_t at = slot++ * queries.padded;
        write(queries, output, document, s.best + at, s.index + (ARGMAX ? at : 0));
    }
    if (block.done_rows && slot) {
        std::copy_n(s.best + slot * queries.padded, queries.padded, s.best);
        if (ARGMAX) std::copy_n(s.index + slot * queries.padded, queries.padded, s.index);
    }
}

// -- scoring ---------------------------------------------------------------------------------------

// Fills a block with rows of `document`, from `done_rows`, and of the documents contiguous to it.
// Returns false if no rows remain. Empty documents before the block are written.
static bool fill_block(const Documents& docs, const Queries& queries, const Output& output,
                       int64_t document, int64_t done_rows, Block& block) {
    while (document < docs.count && docs.lengths[document] == 0)
        write_empty(queries, output, document++);
    if (document == docs.count) return false;
    block.document = document;
    block.open = done_rows > 0;
    block.first = docs.starts[document] + done_rows;
    block.rows = block.num_spans = 0;
    while (block.rows < 32 && document < docs.count) {
        if (docs.lengths[document] > 0) {
            if (docs.starts[document] + done_rows != block.first + block.rows) break;
            const int rows = int(std::min<int64_t>(32 - block.rows, docs.lengths[document] - done_rows));
            block.spans[block.num_spans++] = {block.rows, block.rows + rows, done_rows};
            block.rows += rows;
            done_rows += rows;
            if (done_rows < docs.lengths[document]) break;
        }
        ++document, done_rows = 0;
    }
    block.next = document;
    block.done_rows = done_rows;
    return true;
}

// Returns the address of the rows of a later block: the memory latency exceeds the time per block.
static const char* rows_ahead(const Documents& docs, const Block& block, int blocks) {
    int64_t row = block.first + blocks * 32;
    // The documents of a selection are not contiguous.
    const int64_t next = block.next, later = next + 1;
    if (!block.done_rows && later < docs.count && docs.starts[next] != block.first + block.rows)
        row = docs.starts[later];
    if (docs.kind == INT8) {
        __builtin_prefetch(docs.scales + row);
        __builtin_prefetch(docs.scales + row + 16);
    }
    return (const char*)docs.values + row * docs.row_bytes;
}

static void prefetch(const Documents& docs, const Block& block) {
    const char* from = rows_ahead(docs, block, 2);
    const int64_t size = std::min<int64_t>(32, docs.total) * docs.row_bytes;
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(from + at);
}

// Decodes the rows of a block into the format of the `multiply_*` functions.
static void prepare(const Documents& docs, Scratch& s, Block& block) {
    if (LEVEL < AVX512 || docs.kind != INT8) prefetch(docs, block);
#if LEVEL >= AVX2
    if (docs.kind == BITS) {
        typedef std::conditional_t<LEVEL == AVX2, int16_t,
                                   std::conditional_t<LEVEL == AVX512, uint8_t, int8_t>> Value;
        for (int r = 0; r < block.rows; ++r)
            expand(docs, block.first + r, (Value*)s.floats + r * s.width);
        block.bytes = (const int8_t*)s.floats;
        block.stride = s.width;
        load_factors(docs, block);
        return;
    }
#endif
#if LEVEL >= AVX512
    if (docs.kind == INT8) {
        block.bytes = (const int8_t*)docs.values + block.first * docs.row_bytes;
        block.stride = docs.row_bytes;
        block.scales = docs.scales + block.first;
        // The tile product reads 32 rows, each rounded up to a multiple of 64 bytes.
        const int64_t overread = (s.width + docs.row_bytes - 1) / docs.row_bytes;
        if (LEVEL == AVX512 || block.first + 32 + overread > docs.total) {
            int8_t* copy = (int8_t*)s.floats;
            for (int r = 0; r < block.rows; ++r) {
                const int8_t* row = block.bytes + r * block.stride;
#if LEVEL == AVX512
                offset_int8(row, docs.dim, copy + r * s.width);
#else
                memcpy(copy + r * s.width, row, docs.dim);
#endif
            }
            block.bytes = copy;
            block.stride = s.width;
        }
        return;
    }
#elif LEVEL >= AVX2
    if (docs.kind == INT8) {
        for (int r = 0; r < block.rows; ++r)
            widen_int8((const int8_t*)docs.values + (block.first + r) * docs.row_bytes, docs.dim,
                       (int16_t*)s.floats + r * s.width);
        block.scales = docs.scales + block.first;
        return;
    }
#endif
#if LEVEL >= AMX
    decode_pairs(docs, block, s);
#else
    decode(docs, block, s);
#endif
}

template <bool INTEGERS, bool ARGMAX>
static void score_as(
    const Documents& docs, const Queries& queries, const Output& output, Scratch& s) {
    const int64_t padded = queries.padded, num_panels = padded / 32, panel_size = 32 * s.width;

    Block blocks[2];
    const Block* pending = nullptr;  // block of the stored products whose maxima are not yet taken
    int64_t pending_panel = 0;
    auto take_pending = [&] {
        if (!pending) return;
        for (int i = 0; i < pending->num_spans; ++i) {
            const int64_t at = i * padded + pending_panel * 32;
            const float* offsets = queries.offsets ? queries.offsets + pending_panel * 32 : nullptr;
            take_maxima<INTEGERS, ARGMAX>(s.products, offsets, *pending, pending->spans[i],
                                          i == 0 && pending->open, s.best + at,
                                          s.index + (ARGMAX ? at : 0));
        }
        if (pending_panel == num_panels - 1) finish<ARGMAX>(docs, queries, output, *pending, s);
    };
    int64_t document = 0, done_rows = 0;
    for (int turn = 0;; turn ^= 1) {
        Block& block = blocks[turn];
        if (!fill_block(docs, queries, output, document, done_rows, block)) break;
        document = block.next, done_rows = block.done_rows;
        prepare(docs, s, block);
#if LEVEL >= AVX512
        const char* ahead = rows_ahead(docs, block, BLOCKS_AHEAD);
#endif
        if (num_panels == 0) finish<ARGMAX>(docs, queries, output, block, s);
        for (int64_t panel = 0; panel < num_panels; ++panel) {
            const int64_t offset = panel * panel_size;
#if LEVEL >= AMX
            // Tile products run in parallel with the maxima of the previous panel.
            if (INTEGERS)
                multiply_int8(block, (const int8_t*)queries.packed + offset, s.width / 64,
                              panel || docs.kind != INT8 ? nullptr : ahead);
            else
                multiply_pairs(s, block.rows, (const uint16_t*)queries.packed + offset,
                               padded * s.width, docs.kind == BFLOAT16);
            take_pending();
            store_products(block.rows, s.products);
#else
            take_pending();
#if LEVEL >= AVX512
            if (INTEGERS)
                (queries.tokens - panel * 32 > 16 ? multiply_int8<2> : multiply_int8<1>)(
                    block, (const int8_t*)queries.packed + offset,
                    (const int32_t*)((const int8_t*)queries.packed + padded * s.width) + panel * 32,
                    s.width / 64, panel || docs.kind != INT8 ? nullptr : ahead, s.products);
#elif LEVEL >= AVX2
            if (INTEGERS)
                (queries.tokens - panel * 32 > 16 ? multiply_int16<PARTS> : multiply_int16<PARTS / 2>)(
                    s, block.rows, (const int16_t*)queries.packed + offset, s.products);
#endif
            if (!INTEGERS)
                multiply_float(s, block.rows, (const float*)queries.packed + offset, s.products);
#endif
            pending = &block, pending_panel = panel;
        }
    }
    take_pending();
}

// -- queries of one token --------------------------------------------------------------------------

// Not inlined, because the compiler would unroll it and spill the registers of the loops around it.
__attribute__((noinline)) static int dot_rest(const int8_t* row, const int16_t* query, int dim) {
    int sum = 0;
    for (int d = 0; d < dim; ++d) sum += row[d] * query[d];
    return sum;
}

// Dot products of a row and a query. The sum of int8 products does not overflow, see `_Queries.pack`.
static inline float dot(const int8_t* row, const int16_t* query, int dim) {
    int d = 0, sum = 0;
#if LEVEL >= AVX512
    __m512i sums = _mm512_setzero_si512();
    for (; d + 32 <= dim; d += 32) {
        const __m512i x = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(row + d)));
        sums = _mm512_add_epi32(sums, _mm512_madd_epi16(x, _mm512_loadu_si512(query + d)));
    }
    sum = _mm512_reduce_add_epi32(sums);
#elif LEVEL >= AVX2
    __m256i sums[2] = {};
    for (; d + 32 <= dim; d += 32)
        for (int i = 0; i < 2; ++i) {
            const __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(row + d + 16 * i)));
            const __m256i q = _mm256_loadu_si256((const __m256i*)(query + d + 16 * i));
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(x, q));
        }
    const __m256i both = _mm256_add_epi32(sums[0], sums[1]);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    sum = _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#endif
    if (d < dim) sum += dot_rest(row + d, query + d, dim - d);
    return float(sum);
}

static inline floats load(const float* values) {
    floats x;
    memcpy(&x, values, sizeof(x));
    return x;
}

// Rows of float32, float16 or bfloat16.
template <class Row>
static inline float dot(const Row* row, const float* query, int dim) {
    constexpr int STEP = 2 * LANES;
    floats sums[2] = {};
    float buffer[STEP];
    int d = 0;
    for (; d + STEP <= dim; d += STEP) {
        const float* values = widen(row + d, STEP, buffer);
        for (int i = 0; i < 2; ++i)
            sums[i] += load(values + i * LANES) * load(query + d + i * LANES);
    }
    sums[0] += sums[1];
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += sums[0][lane];
    const float* values = widen(row + d, dim - d, buffer);
    for (int i = 0; d + i < dim; ++i) sum += values[i] * query[d + i];
    return sum;
}

// Writes the scores of documents `from` to `to`. `scales` are those of the rows, or null.
template <class Row, class Query>
static void score_one_query(const Documents& docs, const float* scales, int64_t from, int64_t to,
                            const Query* query, float query_scale, float* scores) {
    const int dim = docs.dim;
    const Row* values = (const Row*)docs.values;
    const int64_t *starts = docs.starts, *lengths = docs.lengths;
    for (int64_t document = from; document < to; ++document) {
        const int64_t first = starts[document], last = first + lengths[document];
        float best = LOWEST;
        for (int64_t row = first; row < last; ++row) {
            const float x = dot(values + row * dim, query, dim);
            best = std::max(best, scales ? x * scales[row] : x);
        }
        scores[document] = best * query_scale;
    }
}

// Panels would multiply 32 tokens. A block of documents stays in the cache for all queries.
template <class Row, class Query>
static void score_one_token(const Documents& docs, const Queries& queries, const Output& output) {
    constexpr int64_t BLOCK = 128;
    const float* scales = docs.kind == INT8 ? docs.scales : nullptr;
    for (int64_t from = 0; from < docs.count; from += BLOCK)
        for (int64_t q = 0; q < queries.count; ++q)
            score_one_query<Row, Query>(
                docs, scales, from, std::min(from + BLOCK, docs.count),
                (const Query*)queries.packed + q * docs.dim, queries.scales ? queries.scales[q] : 1,
                output.scores + q * output.stride);
}

static void score_one_token(const Documents& docs, const Queries& queries, const Output& output) {
    switch (docs.kind) {
        case FLOAT32: return score_one_token<float, float>(docs, queries, output);
        case FLOAT16: return score_one_token<Half, float>(docs, queries, output);
        case BFLOAT16: return score_one_token<Bfloat, float>(docs, queries, output);
        default: return score_one_token<int8_t, int16_t>(docs, queries, output);
    }
}

#if LEVEL >= AVX2
// Selects int8 documents of at most one vector for queries of one token. 32 documents are multiplied
// by panels of 32 queries. `first` is the number of the first document.
static void select_one_vector(const Documents& docs, const Queries& queries,
                              const Selection& selection, int64_t first, Scratch& s) {
    for (int64_t from = 0; from < docs.count; from += 32) {
        const int count = int(std::min<int64_t>(32, docs.count - from));
        for (int r = 0; r < count; ++r) {
            const int64_t document = from + r, start = docs.starts[document];
            if (docs.lengths[document] > 0)
                widen_int8((const int8_t*)docs.values + start * docs.row_bytes, docs.dim,
                           (int16_t*)s.floats + r * s.width);
        }
        for (int64_t panel = 0; panel < queries.padded; panel += 32) {
            multiply_int16(s, count, (const int16_t*)queries.packed + panel * s.width, s.products);
            for (int r = 0; r < count; ++r) {
                if (docs.lengths[from + r] == 0) continue;
                const floats scale = splat(docs.scales[docs.starts[from + r]]);
                for (int p = 0; p < PARTS; ++p) {
                    const int64_t query = panel + p * LANES;
                    const integers products = *(const integers*)(s.products + r * 32 + p * LANES);
                    const floats x = __builtin_convertvector(products, floats) * scale *
                                     load(queries.scales + query);
#if LEVEL >= AVX512
                    uint32_t mask = _mm512_cmp_ps_mask(
                        (__m512)x, (__m512)load(selection.limits + query), _CMP_GE_OQ);
#else
                    uint32_t mask = _mm256_movemask_ps(_mm256_cmp_ps(
                        (__m256)x, (__m256)load(selection.limits + query), _CMP_GE_OQ));
#endif
                    for (; mask; mask &= mask - 1) {
                        const int lane = __builtin_ctz(mask);
                        const int64_t at = (query + lane) * selection.stride +
                                           selection.counts[query + lane]++;
                        selection.found[at] = {x[lane], int32_t(first + from + r)};
                    }
                }
            }
        }
    }
}
#endif

template <bool ARGMAX>
static void score(const Documents& docs, const Queries& queries, const Output& output, Scratch& s) {
    if (queries.one_token) return score_one_token(docs, queries, output);
#if LEVEL >= AMX
    start_tiles();
#endif
    if (LEVEL >= AVX2 && (docs.kind == INT8 || docs.kind == BITS))
        score_as<LEVEL >= AVX2, ARGMAX>(docs, queries, output, s);
    else
        score_as<false, ARGMAX>(docs, queries, output, s);
#if LEVEL >= AMX
    _tile_release();
#endif
}
