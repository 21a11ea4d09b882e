#include "message.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace zcomm {

std::atomic<i64> streamed_from{i64(8) << 20};

namespace {

// Rounding to nearest and subnormal numbers as they are, whatever the caller's thread is set to.
class DefaultArithmetic {
  public:
#if defined(__SSE__)
    DefaultArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~DefaultArithmetic() { _mm_setcsr(before_); }
    DefaultArithmetic(const DefaultArithmetic&) = delete;
    DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

  private:
    unsigned before_;
#else
    DefaultArithmetic() {}
    ~DefaultArithmetic() {}
#endif
};

// Stores past the caches would otherwise become visible after later ones.
void put_stores_in_order() {
#if defined(__SSE__)
    _mm_sfence();
#endif
}

bool quantised(Format format) { return format >= INT8; }

i64 itemsize(Dtype dtype) { return dtype == FLOAT32 ? 4 : 2; }

// The dtype of the elements of a message in a cast format.
Dtype cast_dtype(Format format) { return static_cast<Dtype>(format); }

i64 rounded(i64 nbytes) { return (nbytes + 15) / 16 * 16; }

i64 num_blocks(Codec codec, i64 numel) { return (numel + codec.block - 1) / codec.block; }

i64 code_nbytes(Codec codec, i64 numel) {
    if (!quantised(codec.format)) return numel * itemsize(cast_dtype(codec.format));
    if (codec.format != INT4) return numel;
    return numel / codec.block * (codec.block / 2) + (numel % codec.block + 1) / 2;
}

// The parts of a message, as offsets in bytes: [0, codes) pad [scales, end) pad [.., nbytes).
struct Layout {
    i64 codes, scales, end, nbytes;
};

Layout layout(Codec codec, Segments segments) {
    i64 codes = 0, blocks = 0;
    for (i64 i = 0; i < segments.count; ++i) {
        codes += code_nbytes(codec, segments.lengths[i]);
        if (quantised(codec.format)) blocks += num_blocks(codec, segments.lengths[i]);
    }
    if (!quantised(codec.format)) return {codes, codes, codes, codes};
    i64 scales = rounded(codes), end = scales + 2 * blocks;
    return {codes, scales, end, rounded(end)};
}

bool inside(Segments segments, i64 numel) {
    for (i64 i = 0; i < segments.count; ++i) {
        i64 start = segments.starts ? segments.starts[i] : 0, length = segments.lengths[i];
        if (start < 0 || start > numel || length < 0 || length > numel - start) return false;
    }
    return true;
}

bool streamed(Output out) { return out.nbytes >= streamed_from; }

bool all_zero(const u8* data, i64 begin, i64 end) {
    return std::all_of(data + begin, data + end, [](u8 byte) { return byte == 0; });
}

Status check_wires(const std::vector<Input>& wires, const Layout& parts) {
    if (wires.empty()) return DOES_NOT_FIT;
    for (const Input& wire : wires)
        if (wire.nbytes != parts.nbytes) return DOES_NOT_FIT;
    for (const Input& wire : wires)
        if (!all_zero(wire.data, parts.codes, parts.scales) ||
            !all_zero(wire.data, parts.end, parts.nbytes))
            return PADDING_NOT_ZERO;
    return DONE;
}

void clear_padding(Output wire, const Layout& parts) {
    std::memset(wire.data + parts.codes, 0, parts.scales - parts.codes);
    std::memset(wire.data + parts.end, 0, parts.nbytes - parts.end);
}

// A tile: where it lies in the typed memory and in its segment (in elements), on a wire (in bytes).
struct Tile {
    i64 start, first, numel;
};

struct Place {
    i64 codes, scales;
};

Place advanced(Place place, Codec codec, i64 numel) {
    place.codes += code_nbytes(codec, numel);
    if (quantised(codec.format)) place.scales += 2 * num_blocks(codec, numel);
    return place;
}

template <class Function> void for_each_tile(Segments segments, Function function) {
    i64 next = 0;
    for (i64 i = 0; i < segments.count; ++i) {
        i64 start = segments.starts ? segments.starts[i] : next, length = segments.lengths[i];
        for (i64 done = 0; done < length; done += TILE)
            function(Tile{start + done, done, std::min(TILE, length - done)});
        next = start + length;
    }
}

struct alignas(64) Buffer {
    u8 values[4 * TILE];
};

// Converts between any two dtypes; SATURATE as in Table.
void convert(const Table& table, Dtype from, const u8* in, i64 numel, Dtype to, u8* out,
             bool saturate) {
    Narrow narrow = saturate && to == FLOAT16 ? table.saturate : table.narrow[to];
    if (from == to) return table.copy[to](in, numel, out);
    if (to == FLOAT32) return table.widen[from](in, numel, out);
    if (from == FLOAT32) return narrow(in, numel, 1.0f, out);
    Buffer buffer;
    table.widen[from](in, numel, buffer.values);
    narrow(buffer.values, numel, 1.0f, out);
}

// Sums of one tile: the wires' values in ascending order, as float32.
class Summer {
  public:
    Summer(const Table& table, Codec codec, const std::vector<Input>& wires)
        : table_(table), sums_(table.sum[codec.format]), codec_(codec), wires_(wires) {}

    void operator()(Place place, i64 numel, u8* total) const {
        if (codec_.transformed) return sum_transformed(place, numel, total);
        for (std::size_t count = wires_.size(), w = 0; w < count;) {
            int variant = count - w >= 4 ? 2 : count - w >= 2 ? 1 : 0;
            sum(place, numel, w, variant, w > 0, total);
            w += std::size_t(1) << variant;
        }
    }

  private:
    void sum(Place place, i64 numel, std::size_t w, int variant, bool add, u8* total) const {
        const u8 *codes[MOST_WIRES], *scales[MOST_WIRES];
        for (int k = 0; k < 1 << variant; ++k) {
            codes[k] = wires_[w + k].data + place.codes;
            scales[k] = wires_[w + k].data + place.scales;
        }
        sums_[add][variant](codes, scales, numel, codec_.block, total);
    }

    void sum_transformed(Place place, i64 numel, u8* total) const {
        sum(place, numel, 0, 0, false, total);
        table_.transform[FLOAT32](total, numel, total);
        Buffer buffer;
        for (std::size_t w = 1; w < wires_.size(); ++w) {
            sum(place, numel, w, 0, false, buffer.values);
            table_.add_transform(buffer.values, numel, total);
        }
    }

    const Table& table_;
    const Sum (&sums_)[2][3];
    Codec codec_;
    const std::vector<Input>& wires_;
};

// Writes the tiles of a message.
class Writer {
  public:
    Writer(const Table& table, Codec codec, Output wire, u64 seed)
        : table_(table), codec_(codec), wire_(wire), seed_(seed) {}

    void operator()(Dtype dtype, const u8* values, Tile tile, Place place) const {
        u8* codes = wire_.data + place.codes;
        if (!quantised(codec_.format))
            return convert(table_, dtype, values, tile.numel, cast_dtype(codec_.format), codes,
                           false);
        if (!codec_.transformed) return encode(dtype, values, tile, place);
        Buffer buffer;
        table_.transform[dtype](values, tile.numel, buffer.values);
        encode(FLOAT32, buffer.values, tile, place);
    }

  private:
    void encode(Dtype dtype, const u8* values, Tile tile, Place place) const {
        int code = codec_.format - INT8;
        Encode loop = codec_.stochastic ? table_.stochastic[dtype][code]
                                        : table_.nearest[dtype][code];
        loop(values, tile.numel, codec_.block, Random{u64(tile.first), seed_}, streamed(wire_),
             wire_.data + place.codes, wire_.data + place.scales);
    }

    const Table& table_;
    Codec codec_;
    Output wire_;
    u64 seed_;
};

// Decodes the tiles of one message.
class Reader {
  public:
    Reader(const Table& table, Codec codec, const std::vector<Input>& wire, Dtype dtype,
           bool streamed)
        : table_(table), sum_(table, codec, wire), codec_(codec), wire_(wire[0]), dtype_(dtype),
          streamed_(streamed) {}

    void operator()(Place place, i64 numel, u8* out) const {
        const u8* codes = wire_.data + place.codes;
        if (!quantised(codec_.format))
            return convert(table_, cast_dtype(codec_.format), codes, numel, dtype_, out, true);
        if (!codec_.transformed)
            return table_.decode[codec_.format - INT8][dtype_](codes, wire_.data + place.scales,
                                                               numel, codec_.block, streamed_, out);
        Buffer buffer;
        sum_(place, numel, buffer.values);
        convert(table_, FLOAT32, buffer.values, numel, dtype_, out, true);
    }

  private:
    const Table& table_;
    Summer sum_;
    Codec codec_;
    Input wire_;
    Dtype dtype_;
    bool streamed_;
};

}  // namespace

Status encode(const Table& table, Codec codec, Input x, Dtype dtype, Segments segments,
              Output wire, u64 seed) {
    if (!inside(segments, x.nbytes / itemsize(dtype))) return DOES_NOT_FIT;
    Layout parts = layout(codec, segments);
    if (wire.nbytes != parts.nbytes) return DOES_NOT_FIT;
    DefaultArithmetic arithmetic;
    clear_padding(wire, parts);
    Writer write(table, codec, wire, seed);
    Place place{0, parts.scales};
    for_each_tile(segments, [&](Tile tile) {
        write(dtype, x.data + tile.start * itemsize(dtype), tile, place);
        place = advanced(place, codec, tile.numel);
    });
    put_stores_in_order();
    return DONE;
}

Status decode(const Table& table, Codec codec, Input wire, Segments segments, Output out,
              Dtype dtype) {
    if (!inside(segments, out.nbytes / itemsize(dtype))) return DOES_NOT_FIT;
    Layout parts = layout(codec, segments);
    std::vector<Input> wires(1, wire);
    if (Status status = check_wires(wires, parts)) return status;
    DefaultArithmetic arithmetic;
    Reader read(table, codec, wires, dtype, streamed(out));
    Place place{0, parts.scales};
    for_each_tile(segments, [&](Tile tile) {
        read(place, tile.numel, out.data + tile.start * itemsize(dtype));
        place = advanced(place, codec, tile.numel);
    });
    put_stores_in_order();
    return DONE;
}

Status decode_reduce(const Table& table, Codec codec, const std::vector<Input>& wires,
                     Segments segments, Output out, Dtype dtype, i64 divisor) {
    if (divisor < 1 || !inside(segments, out.nbytes / itemsize(dtype))) return DOES_NOT_FIT;
    Layout parts = layout(codec, segments);
    if (Status status = check_wires(wires, parts)) return status;
    DefaultArithmetic arithmetic;
    Summer sum(table, codec, wires);
    Place place{0, parts.scales};
    Buffer buffer;
    for_each_tile(segments, [&](Tile tile) {
        sum(place, tile.numel, buffer.values);
        table.narrow[dtype](buffer.values, tile.numel, float(divisor),
                            out.data + tile.start * itemsize(dtype));
        place = advanced(place, codec, tile.numel);
    });
    return DONE;
}

Status decode_reduce_encode(const Table& table, Codec in, const std::vector<Input>& wires,
                            Codec out, Segments segments, Output wire, u64 seed) {
    Segments lengths{nullptr, segments.lengths, segments.count};
    for (i64 i = 0; i < lengths.count; ++i)
        if (lengths.lengths[i] < 0) return DOES_NOT_FIT;
    Layout parts_in = layout(in, lengths), parts_out = layout(out, lengths);
    if (Status status = check_wires(wires, parts_in)) return status;
    if (wire.nbytes != parts_out.nbytes) return DOES_NOT_FIT;
    DefaultArithmetic arithmetic;
    clear_padding(wire, parts_out);
    Summer sum(table, in, wires);
    Writer write(table, out, wire, seed);
    Place from{0, parts_in.scales}, to{0, parts_out.scales};
    Buffer buffer;
    for_each_tile(lengths, [&](Tile tile) {
        sum(from, tile.numel, buffer.values);
        write(FLOAT32, buffer.values, tile, to);
        from = advanced(from, in, tile.numel);
        to = advanced(to, out, tile.numel);
    });
    put_stores_in_order();
    return DONE;
}

}  // namespace zcomm
