// The scoring of one block of document rows, compiled once an instruction set.
//
// Included by maxsim.cpp inside a namespace of its own, with LEVEL set to what may be used:
// GENERIC (any machine), AVX2 (with FMA and F16C), AVX512 (with VNNI), AMX (with int8 and bf16).
//
// A block is 32 rows, tokens of one or several documents that lie side by side. It is multiplied
// with all query tokens, 32 at a time (a panel), and the maxima of a document's rows are kept until
// the document ends. So no row is padded, and nothing larger than a block leaves the cache.

typedef float f16v __attribute__((vector_size(64), aligned(64)));
typedef float f16u __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16v __attribute__((vector_size(64), aligned(64)));

static inline f16v splat(float x) { return f16v{} + x; }

// -- rows as float32 ------------------------------------------------------------------------------

static inline float half_bits(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    if (rest >= 0x7c00) {
        bits = sign | 0x7f800000 | ((rest & 0x3ff) << 13);
    } else {
        // Shifted into a float's place and scaled by 2^112: right for subnormal numbers too.
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

static inline void row_of_half(const uint16_t* in, int dim, float* out) {
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

static inline void row_of_bfloat(const uint16_t* in, int dim, float* out) {
    for (int d = 0; d < dim; ++d) {
        uint32_t bits = uint32_t(in[d]) << 16;
        memcpy(out + d, &bits, 4);
    }
}

static inline void row_of_int8(const int8_t* in, int dim, float* out) {
    for (int d = 0; d < dim; ++d) out[d] = in[d];
}

static inline void row_of_bits(const uint8_t* in, int dim, float* out) {
    int d = 0;
#if LEVEL >= AVX512
    for (; d + 16 <= dim; d += 16) {
        uint16_t bits;
        memcpy(&bits, in + d / 8, 2);
        _mm512_storeu_ps(out + d, _mm512_mask_blend_ps(bits, _mm512_set1_ps(-1), _mm512_set1_ps(1)));
    }
#endif
    for (; d < dim; ++d) out[d] = (in[d / 8] >> (d % 8)) & 1 ? 1.0f : -1.0f;
}

// A centroid and the weights of a residual's buckets, 2 or 4 bits each; returns the length's inverse.
static inline float row_of_residual(const Documents& docs, int64_t row, int dim, float* out) {
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

// -- a block ready to be multiplied ----------------------------------------------------------------

struct Block {
    int64_t first;  // the row of the documents that is row 0
    int rows;
    const int8_t* bytes;  // int8 as they lie, or a copy at the end of the memory
    int64_t stride;
    float* scales;  // one a row; null: all 1
    bool scaled;
};

#if LEVEL >= AMX
// x = high + low, two bfloat16 of 8 bits each: nothing of a float16 is lost.
static inline void split(__m512 a, __m512 b, uint16_t* high, uint16_t* low) {
    const __m512i h = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    const __m512i ah = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(h)), 16);
    const __m512i bh = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(h, 1)), 16);
    const __m512 al = _mm512_sub_ps(a, _mm512_castsi512_ps(ah));
    const __m512 bl = _mm512_sub_ps(b, _mm512_castsi512_ps(bh));
    _mm512_store_si512(high, h);
    _mm512_store_si512(low, (__m512i)_mm512_cvtne2ps_pbh(bl, al));
}

// The numbers d to d + 32 of a row, those at or behind `dim` zero.
static inline __mmask32 within(int d, int dim) {
    return dim - d >= 32 ? 0xffffffffu : dim > d ? (1u << (dim - d)) - 1 : 0;
}

// Rows as pairs of bfloat16, `width` apart.
static void decode_pairs(const Documents& docs, Block& block, Scratch& s) {
    const int dim = docs.dim, width = s.width;
    block.scaled = docs.kind == BINARY || docs.kind == RESIDUAL;
    for (int r = 0; r < block.rows; ++r) {
        const int64_t row = block.first + r;
        const uint8_t* in = (const uint8_t*)docs.values + row * docs.row_bytes;
        __builtin_prefetch(in + 64 * docs.row_bytes);
        uint16_t *high = s.high + r * width, *low = s.low + r * width;
        switch (docs.kind) {
            case FLOAT16:
                for (int d = 0; d < width; d += 32) {
                    const __m512i x = _mm512_maskz_loadu_epi16(within(d, dim), in + d * 2);
                    split(_mm512_cvtph_ps(_mm512_castsi512_si256(x)),
                          _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)), high + d, low + d);
                }
                break;
            case BFLOAT16:
                for (int d = 0; d < width; d += 32)
                    _mm512_store_si512(high + d, _mm512_maskz_loadu_epi16(within(d, dim), in + d * 2));
                break;
            case BINARY:
                for (int d = 0; d < width; d += 32) {
                    uint32_t bits = 0;
                    memcpy(&bits, in + d / 8, std::max(0, std::min(4, int(docs.row_bytes) - d / 8)));
                    const __m512i signs = _mm512_mask_blend_epi16(
                        bits, _mm512_set1_epi16(short(0xbf80)), _mm512_set1_epi16(0x3f80));
                    _mm512_store_si512(high + d, _mm512_maskz_mov_epi16(within(d, dim), signs));
                }
                s.scales[r] = 1 / std::sqrt(float(dim));
                break;
            default:
                s.scales[r] = row_of_residual(docs, row, dim, s.floats);  // zeros lie behind it
                for (int d = 0; d < width; d += 32)
                    split(_mm512_load_ps(s.floats + d), _mm512_load_ps(s.floats + d + 16), high + d,
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

// Tiles 0-3 hold the products of two times 16 rows with two times 16 query tokens.
static inline void store_products(float* out, bool two) {
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 16, 128);
    if (two) {
        _tile_stored(2, out + 16 * 32, 128);
        _tile_stored(3, out + 16 * 32 + 16, 128);
    }
}

static inline void multiply_int8(const Block& block, const int8_t* panel, int steps, float* out) {
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
        _tile_dpbssd(1, 4, 7);
        if (two) {
            _tile_loadd(5, a2 + k * 64, block.stride);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    store_products(out, two);
}

// high x high + high x low + low x high: what is left out is 2^-18 of a product.
static inline void multiply_bfloat(
    const Scratch& s, int rows, const uint16_t* panel, int64_t low_at, bool exact, float* out) {
    const bool two = rows > 16;
    const int steps = s.width / 32;
    const int64_t stride = s.width * 2;
    const uint16_t* panel2 = panel + steps * 512;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < steps; ++k) {
        _tile_loadd(4, s.high + k * 32, stride);
        if (two) _tile_loadd(5, s.high + 16 * s.width + k * 32, stride);
        for (int low = 0; low < 2; ++low) {
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
            _tile_loadd(5, s.low + 16 * s.width + k * 32, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    store_products(out, two);
}
#elif LEVEL >= AVX512
// Of one operand the instruction takes unsigned bytes: the query's have 128 added, and 128 times the
// sum of a row is taken off again.
static inline void multiply_int8(const Block& block, const int8_t* panel, int steps, float* out) {
    const int words = steps * 16;
    for (int r = 0; r < block.rows; r += 4) {
        __m512i sums[4][2], bias[4];
        for (int i = 0; i < 4; ++i) sums[i][0] = sums[i][1] = bias[i] = _mm512_setzero_si512();
        for (int k = 0; k < words; ++k) {
            const __m512i q0 = _mm512_loadu_si512(panel + k * 64);
            const __m512i q1 = _mm512_loadu_si512(panel + steps * 1024 + k * 64);
            const __m512i offset = _mm512_set1_epi8(char(128));
            for (int i = 0; i < 4; ++i) {
                int32_t four;
                memcpy(&four, block.bytes + (r + i) * block.stride + k * 4, 4);
                const __m512i doc = _mm512_set1_epi32(four);
                sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], _mm512_xor_si512(q0, offset), doc);
                sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], _mm512_xor_si512(q1, offset), doc);
                bias[i] = _mm512_dpbusd_epi32(bias[i], offset, doc);
            }
        }
        for (int i = 0; i < 4; ++i)
            for (int half = 0; half < 2; ++half)
                _mm512_storeu_si512(
                    out + (r + i) * 32 + half * 16, _mm512_sub_epi32(sums[i][half], bias[i]));
    }
}
#endif

#if LEVEL < AMX
// Rows as float32, `width` apart, zero behind the last dimension and the last row.
static void decode(const Documents& docs, Block& block, Scratch& s) {
    const int dim = docs.dim, width = s.width;
    block.scaled = docs.kind == INT8 || docs.kind == BINARY || docs.kind == RESIDUAL;
    for (int r = 0; r < block.rows; ++r) {
        const int64_t row = block.first + r;
        const uint8_t* in = (const uint8_t*)docs.values + row * docs.row_bytes;
        float* out = s.floats + r * width;
        switch (docs.kind) {
            case FLOAT32: memcpy(out, in, sizeof(float) * dim); break;
            case FLOAT16: row_of_half((const uint16_t*)in, dim, out); break;
            case BFLOAT16: row_of_bfloat((const uint16_t*)in, dim, out); break;
            case INT8: row_of_int8((const int8_t*)in, dim, out); s.scales[r] = docs.scales[row]; break;
            case BINARY: row_of_bits(in, dim, out); s.scales[r] = 1 / std::sqrt(float(dim)); break;
            default: s.scales[r] = row_of_residual(docs, row, dim, out);
        }
    }
}

#if LEVEL >= AVX512
constexpr int ROWS = 8;  // 16 of 32 registers hold sums
#else
constexpr int ROWS = 2;  // of 16 registers, or of 32 smaller ones
#endif

static inline void multiply_float(const Scratch& s, const float* panel, float* out) {
    for (int r = 0; r < 32; r += ROWS) {
        f16v sums[ROWS][2] = {};
        for (int d = 0; d < s.width; ++d) {
            const f16v q0 = *(const f16v*)(panel + d * 32), q1 = *(const f16v*)(panel + d * 32 + 16);
            for (int i = 0; i < ROWS; ++i) {
                const f16v x = splat(s.floats[(r + i) * s.width + d]);
                sums[i][0] += x * q0;
                sums[i][1] += x * q1;
            }
        }
        for (int i = 0; i < ROWS; ++i) {
            *(f16v*)(out + (r + i) * 32) = sums[i][0];
            *(f16v*)(out + (r + i) * 32 + 16) = sums[i][1];
        }
    }
}
#endif

// -- maxima ---------------------------------------------------------------------------------------

struct Span {  // rows of a block that belong to one document
    int first, last;
    int64_t row_in_document;
};

static inline f16v similarity(const float* products, int place, bool integers) {
    if (!integers) return *(const f16v*)(products + place);
    return __builtin_convertvector(*(const i16v*)(products + place), f16v);
}

template <bool INTEGERS, bool ARGMAX>
static inline void take_maxima(
    const float* products, const Block& block, const Span& span, float* best, int32_t* index) {
    f16v m0 = *(f16v*)best, m1 = *(f16v*)(best + 16);
    i16v n0 = {}, n1 = {};
    if (ARGMAX) n0 = *(i16v*)index, n1 = *(i16v*)(index + 16);
    for (int r = span.first; r < span.last; ++r) {
        f16v x0 = similarity(products, r * 32, INTEGERS);
        f16v x1 = similarity(products, r * 32 + 16, INTEGERS);
        if (INTEGERS || block.scaled) {
            const f16v scale = splat(block.scales[r]);
            x0 *= scale;
            x1 *= scale;
        }
        if (ARGMAX) {
            const i16v at = i16v{} + int32_t(span.row_in_document + r - span.first);
            n0 = x0 > m0 ? at : n0;
            n1 = x1 > m1 ? at : n1;
        }
#if LEVEL >= AVX512
        m0 = (f16v)_mm512_max_ps((__m512)x0, (__m512)m0);
        m1 = (f16v)_mm512_max_ps((__m512)x1, (__m512)m1);
#else
        m0 = x0 > m0 ? x0 : m0;
        m1 = x1 > m1 ? x1 : m1;
#endif
    }
    *(f16v*)best = m0;
    *(f16v*)(best + 16) = m1;
    if (ARGMAX) *(i16v*)index = n0, *(i16v*)(index + 16) = n1;
}

static inline float sum_of(const float* values, int64_t first, int64_t last) {
    f16v sums = {};
    int64_t i = first;
    for (; i + 16 <= last; i += 16) sums += *(const f16u*)(values + i);
    float sum = 0;
    for (int lane = 0; lane < 16; ++lane) sum += sums[lane];
    for (; i < last; ++i) sum += values[i];
    return sum;
}

static void finish(const Queries& queries, const Output& output, int64_t document, float* best,
                   const int32_t* index) {
    if (queries.scales)
        for (int64_t i = 0; i < queries.padded; ++i) best[i] *= queries.scales[i];
    if (output.scores) {
        for (int64_t q = 0; q < queries.count; ++q)
            output.scores[q * output.stride + document] =
                sum_of(best, queries.bounds[q], queries.bounds[q + 1]);
    }
    if (output.best) {
        memcpy(output.best + document * queries.tokens, best, sizeof(float) * queries.tokens);
        memcpy(output.index + document * queries.tokens, index, sizeof(int32_t) * queries.tokens);
    }
}

static void finish_empty(const Queries& queries, const Output& output, int64_t document) {
    const float lowest = -std::numeric_limits<float>::infinity();
    for (int64_t q = 0; output.scores && q < queries.count; ++q)
        output.scores[q * output.stride + document] = lowest;
    for (int64_t i = 0; output.best && i < queries.tokens; ++i) {
        output.best[document * queries.tokens + i] = lowest;
        output.index[document * queries.tokens + i] = -1;
    }
}

template <bool ARGMAX>
static void score(const Documents& docs, const Queries& queries, const Output& output, Scratch& s) {
    const int64_t padded = queries.padded, num_panels = padded / 32;
    const bool integers = LEVEL >= AVX512 && docs.kind == INT8;
    const int64_t panel_size = 32 * s.width;
    const float lowest = -std::numeric_limits<float>::infinity();
#if LEVEL >= AMX
    start_tiles();
    const bool exact = docs.kind == BFLOAT16 || docs.kind == BINARY;
#endif
    int64_t document = 0, row_in_document = 0;
    bool open = false;  // whether slot 0 holds the maxima of a document that has begun
    while (document < docs.count) {
        if (docs.lengths[document] == 0) {
            finish_empty(queries, output, document++);
            continue;
        }
        // Rows of this document and of those that lie behind it without a gap.
        Span spans[32];
        int num_spans = 0, rows = 0;
        const int64_t start = docs.starts[document] + row_in_document;
        int64_t next = document, at = row_in_document;
        while (rows < 32 && next < docs.count) {
            if (docs.lengths[next] == 0) {
                if (num_spans && rows) { ++next; continue; }
                break;
            }
            if (docs.starts[next] + at != start + rows) break;
            const int64_t here = std::min<int64_t>(32 - rows, docs.lengths[next] - at);
            spans[num_spans++] = {rows, int(rows + here), at};
            rows += int(here);
            at += here;
            if (at < docs.lengths[next]) break;
            ++next, at = 0;
        }
        Block block = {start, rows, nullptr, 0, s.scales, false};
        for (int i = 0; i < num_spans; ++i) {
            if (i == 0 && open) continue;
            std::fill_n(s.best + i * padded, padded, lowest);
            if (ARGMAX) std::fill_n(s.index + i * padded, padded, -1);
        }
        if (integers) {
            block.bytes = (const int8_t*)docs.values + start * docs.row_bytes;
            block.stride = docs.row_bytes;
            block.scales = const_cast<float*>(docs.scales) + start;
            block.scaled = true;
            // A whole block reads 32 rows of a multiple of 64 bytes.
            if (start + 32 + (s.width + docs.row_bytes - 1) / docs.row_bytes > docs.total) {
                memset(s.bytes, 0, 32 * s.width);
                for (int r = 0; r < rows; ++r)
                    memcpy(s.bytes + r * s.width, block.bytes + r * block.stride, docs.dim);
                block.bytes = s.bytes;
                block.stride = s.width;
            } else {
                const int64_t ahead = start + 64;
                if (ahead + 32 <= docs.total)
                    for (int64_t b = 0; b < 32 * docs.row_bytes; b += 64)
                        __builtin_prefetch((const int8_t*)docs.values + ahead * docs.row_bytes + b);
            }
        } else {
#if LEVEL >= AMX
            decode_pairs(docs, block, s);
#else
            decode(docs, block, s);
#endif
        }
        for (int64_t panel = 0; panel < num_panels; ++panel) {
            if (integers) {
#if LEVEL >= AVX512
                multiply_int8(block, (const int8_t*)queries.packed + panel * panel_size,
                              s.width / 64, s.products);
#endif
            } else {
#if LEVEL >= AMX
                multiply_bfloat(s, rows, (const uint16_t*)queries.packed + panel * panel_size,
                                padded * s.width, exact, s.products);
#else
                multiply_float(s, (const float*)queries.packed + panel * panel_size, s.products);
#endif
            }
            for (int i = 0; i < num_spans; ++i) {
                float* best = s.best + i * padded + panel * 32;
                int32_t* index = s.index + i * padded + panel * 32;
                if (integers)
                    take_maxima<true, ARGMAX>(s.products, block, spans[i], best, index);
                else
                    take_maxima<false, ARGMAX>(s.products, block, spans[i], best, index);
            }
        }
        // The documents that end here; the last one may go on in the next block.
        int slot = 0;
        for (; document < next; ++document) {
            if (docs.lengths[document] == 0) {
                finish_empty(queries, output, document);
                continue;
            }
            finish(queries, output, document, s.best + slot * padded, s.index + slot * padded);
            ++slot;
        }
        row_in_document = at;
        open = at > 0;
        if (open && slot > 0) {
            std::copy_n(s.best + slot * padded, padded, s.best);
            if (ARGMAX) std::copy_n(s.index + slot * padded, padded, s.index);
        }
    }
#if LEVEL >= AMX
    _tile_release();
#endif
}
