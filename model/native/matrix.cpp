#include "matrix.h"

#include <sys/mman.h>

#include <new>
#include <vector>

#include "mx.h"

namespace mr {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kChunk = size_t(16) << 20;

uint16_t mx_value_bf16(const Source& s, int64_t r, int64_t c) {
    const uint8_t byte = static_cast<const uint8_t*>(s.data)[r * (s.cols / 2) + c / 2];
    const int code = c % 2 ? byte >> 4 : byte & 15;
    const int e = s.scale[r * (s.cols / kMxGroup) + c / kMxGroup];
    if (e == 255) return 0x7FC0;
    const uint16_t one = mx_bf16(code);
    const int exponent = (one >> 7 & 255) + e - 127;
    if (code & 7 && exponent > 0 && exponent < 255) return uint16_t(one + (e - 127) * 128);
    const float value = std::ldexp(bf16_to_float(one), e - 127);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t(bits >> 16);
}

float value(const Source& s, int64_t r, int64_t c) {
    switch (Kind(s.kind)) {
        case Kind::kF32: return static_cast<const float*>(s.data)[r * s.row_stride + c * s.col_stride];
        case Kind::kBf16: return bf16_to_float(static_cast<const uint16_t*>(s.data)[r * s.row_stride + c * s.col_stride]);
        default: return bf16_to_float(mx_value_bf16(s, r, c));
    }
}

uint16_t value_bf16(const Source& s, int64_t r, int64_t c) {
    if (Kind(s.kind) == Kind::kMx) return mx_value_bf16(s, r, c);
    return static_cast<const uint16_t*>(s.data)[r * s.row_stride + c * s.col_stride];
}

bool fits_mx(const Source& s) {
    if (Kind(s.kind) != Kind::kMx || s.cols % kMxGroup) return false;
    const size_t count = size_t(s.rows) * size_t(s.cols / kMxGroup);
    for (size_t i = 0; i < count; ++i)
        if (s.scale[i] == 0 || s.scale[i] == 255) return false;
    return true;
}

// Which part, and which of its rows, feeds a panel's column; part < 0 for padding.
struct Feed { int part, row; };

Feed feed(const Matrix& m, const Source* parts, int num_parts, Join join, int panel, int column) {
    if (join == Join::kGlu) {
        const int row = panel * kLanes + column % kLanes;
        return row < m.n ? Feed{column / kLanes, row} : Feed{-1, 0};
    }
    int row = panel * kPanel + column;
    if (row >= m.n) return {-1, 0};
    if (join == Join::kColumns) return {0, row};
    int part = 0;
    while (row >= parts[part].rows) row -= parts[part++].rows;
    return {part < num_parts ? part : -1, row};
}

template <class T, class Get, class Put>
void fill(const Matrix& m, const Source* parts, int num_parts, Join join, const Get& get, const Put& put) {
    const int pieces = join == Join::kColumns ? num_parts : 1;
    for (int p = 0; p < m.panels; ++p)
        for (int column = 0; column < kPanel; ++column) {
            const Feed f = feed(m, parts, num_parts, join, p, column);
            int k = 0;
            for (int piece = 0; piece < pieces; ++piece) {
                const Source& s = parts[join == Join::kColumns ? piece : f.part < 0 ? 0 : f.part];
                for (int c = 0; c < s.cols; ++c, ++k) put(p, k, column, f.part < 0 ? T(0) : get(s, f.row, c));
            }
        }
}

void fill_mx(const Matrix& m, const Source* parts, int num_parts, Join join, uint8_t* out) {
    for (int p = 0; p < m.panels; ++p)
        for (int column = 0; column < kPanel; ++column) {
            const Feed f = feed(m, parts, num_parts, join, p, column);
            const Source& s = parts[f.part < 0 ? 0 : f.part];
            const uint8_t* codes = static_cast<const uint8_t*>(s.data) + int64_t(f.row) * (s.cols / 2);
            const uint8_t* scale = s.scale + int64_t(f.row) * (s.cols / kMxGroup);
            for (int g = 0; g < m.k / kMxGroup; ++g) {
                uint8_t* group = out + size_t(p) * m.panel_bytes + size_t(g) * kMxGroupBytes;
                group[column] = f.part < 0 ? 127 : scale[g];
                if (f.part < 0) continue;  // codes are zero already
                for (int i = 0; i < kMxGroup; ++i) {
                    const int c = g * kMxGroup + i, code = c % 2 ? codes[c / 2] >> 4 : codes[c / 2] & 15;
                    const MxPlace at = mx_place(i % 4, column);
                    group[kPanel + (i / 4) * 4 * kLanes + at.byte] |= uint8_t(code << at.shift);
                }
            }
        }
}

Kind joint_kind(const Source* parts, int num_parts, Join join) {
    bool mx = join != Join::kColumns, f32 = false;
    for (int i = 0; i < num_parts; ++i) {
        mx = mx && fits_mx(parts[i]);
        f32 = f32 || Kind(parts[i].kind) == Kind::kF32;
    }
    return mx ? Kind::kMx : f32 ? Kind::kF32 : Kind::kBf16;
}

}  // namespace

Arena::~Arena() {
    for (uint8_t* chunk : chunks_) ::operator delete[](chunk, std::align_val_t(kHugePage));
}

uint8_t* Arena::take(size_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    if (used_ + bytes > capacity_) {
        capacity_ = bytes > kChunk ? bytes : kChunk;
        auto* chunk = static_cast<uint8_t*>(::operator new[](capacity_, std::align_val_t(kHugePage)));
#if defined(MADV_HUGEPAGE)
        madvise(chunk, capacity_, MADV_HUGEPAGE);  // fewer TLB misses while streaming; refused, it is only slower
#endif
        chunks_.push_back(chunk);
        used_ = 0;
    }
    uint8_t* at = chunks_.back() + used_;
    used_ += bytes;
    bytes_ += bytes;
    return at;
}

Matrix pack(Arena& arena, const Source* parts, int num_parts, Join join, bool widen) {
    Matrix m;
    m.kind = joint_kind(parts, num_parts, join);
    if (widen && m.kind == Kind::kMx) m.kind = Kind::kBf16;
    m.glu = join == Join::kGlu;
    m.n = parts[0].rows, m.k = parts[0].cols;
    for (int i = 1; i < num_parts; ++i) {
        if (join == Join::kRows) m.n += parts[i].rows;
        if (join == Join::kColumns) m.k += parts[i].cols;
    }
    m.panels = (m.n + m.panel_outputs() - 1) / m.panel_outputs();
    m.panel_bytes = m.kind == Kind::kMx ? size_t(m.k / kMxGroup) * kMxGroupBytes
                                        : size_t(m.k) * kPanel * (m.kind == Kind::kF32 ? 4 : 2);
    const size_t bytes = m.panel_bytes * size_t(m.panels);
    uint8_t* out = arena.take(bytes);
    m.data = out;
    if (m.kind == Kind::kF32) {
        fill<float>(m, parts, num_parts, join, value, [&](int p, int k, int column, float x) {
            reinterpret_cast<float*>(out + size_t(p) * m.panel_bytes)[size_t(k) * kPanel + column] = x;
        });
    } else if (m.kind == Kind::kBf16) {
        fill<uint16_t>(m, parts, num_parts, join, value_bf16, [&](int p, int k, int column, uint16_t x) {
            const size_t word = size_t(k) * kLanes + column % kLanes;
            reinterpret_cast<uint16_t*>(out + size_t(p) * m.panel_bytes)[word * 2 + column / kLanes] = x;
        });
    } else {
        std::memset(out, 0, bytes);
        fill_mx(m, parts, num_parts, join, out);
    }
    return m;
}

float unpack_one(const Matrix& m, int row, int col) {
    const int half = m.glu ? row / m.n : row % kPanel / kLanes;
    const int local = m.glu ? row % m.n : row;
    const uint8_t* panel = m.panel(local / m.panel_outputs());
    const int j = local % kLanes, column = j + half * kLanes;
    if (m.kind == Kind::kF32) return reinterpret_cast<const float*>(panel)[size_t(col) * kPanel + column];
    const auto bf16 = [&](const uint8_t* p, int k) {
        return bf16_to_float(reinterpret_cast<const uint16_t*>(p)[(size_t(k) * kLanes + j) * 2 + half]);
    };
    if (m.kind == Kind::kBf16) return bf16(panel, col);
    std::vector<uint8_t> widened(size_t(m.k) * kPanel * 2);
    mx_to_bf16(panel, m.k, widened.data());
    return bf16(widened.data(), col);
}

}  // namespace mr
