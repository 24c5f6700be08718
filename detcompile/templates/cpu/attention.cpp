// Entries of causal attention: the paged cache (written first, then attended) and dense keys.
//
// Legend: T tokens, S sequences, B batch, Hq Hkv heads, D Dv head dims. Strides count elements.
#include "attention_tile.h"
#include "distinct.h"
#include "kernels.h"

namespace {

// errors in a step's metadata; the values are those of templates/attention/op.py
enum Fault : int64_t { kFine = 0, kBadSlot = 1, kBadCuSeqlens = 2, kBadSeqLen = 3, kBadBlock = 4, kSameSlot = 5 };

struct Metadata {
  const int64_t* slot_mapping; const int32_t* cu_seqlens; const int32_t* seq_lens; const int32_t* block_table;
  int64_t T, S, max_blocks, num_blocks, block_size, num_slots;  // num_slots is a multiple of T
  Visible visible;

  // `where` receives the index of the offending token or sequence
  Fault check(int64_t* where) const {
    for (*where = 0; *where < num_slots; ++*where)
      if (slot_mapping[*where] < -1 || slot_mapping[*where] >= num_blocks * block_size) return kBadSlot;
    if (cu_seqlens[0] != 0) return *where = 0, kBadCuSeqlens;
    for (*where = 0; *where < S; ++*where) {
      int64_t s = *where, num_queries = int64_t(cu_seqlens[s + 1]) - cu_seqlens[s], length = seq_lens[s];
      if (num_queries < 0 || cu_seqlens[s + 1] > T) return kBadCuSeqlens;
      if (num_queries == 0) continue;
      if (length < num_queries || length > max_blocks * block_size) return kBadSeqLen;
      int64_t first = visible.first(length - num_queries);
      for (int64_t block = first / block_size; block <= (length - 1) / block_size; block++)
        if (block_table[s * max_blocks + block] < 0 || block_table[s * max_blocks + block] >= num_blocks) return kBadBlock;
    }
    *where = first_repeat(slot_mapping, num_slots, num_blocks * block_size);
    return *where < 0 ? kFine : kSameSlot;
  }
};

void write_cache(const Metadata& meta, const char* source, int32_t dtype, const int64_t* strides, char* cache, int32_t cache_dtype,
                 const int64_t* cache_strides, int64_t heads, int64_t width, int32_t num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t place = 0; place < meta.num_slots; place++) {
    int64_t slot = meta.slot_mapping[place], t = place % meta.T;
    if (slot < 0) continue;
    int64_t target = slot / meta.block_size * cache_strides[0] + slot % meta.block_size * cache_strides[1];
    for (int64_t head = 0; head < heads; head++)
      for (int64_t d = 0; d < width; d += kLanes)
        store_as(cache, cache_dtype, target + head * cache_strides[2] + d,
                 load_as(source, dtype, t * strides[0] + head * strides[1] + d, width - d), width - d);
  }
}

}  // namespace

// q [B, Hq, T, D], k v [B, Hkv, T, D | Dv]; strides[9]: batch, head, token of q, of k, of v. out [B, Hq, T, Dv] contiguous.
// scalars[3]: the first three fields of Scores. relative [B, Hq, T, extent] contiguous, or null.
EXPORT void detcompile_dense_attention(const char* q, const char* k, const char* v, char* out, const int64_t* strides, int64_t B,
                                       int64_t T, int64_t Hq, int64_t Hkv, int64_t D, int64_t Dv, int64_t window, int64_t attention_chunk,
                                       int64_t chunk, const float* scalars, const float* slopes, const float* sinks,
                                       const float* relative, int64_t extent, int32_t dtype, int32_t num_threads) {
  Heads h{Hq, Hkv, D, Dv, strides[2], strides[1], Dv, T * Dv, strides[5], strides[4], 0, strides[8], strides[7], 0,
          1, chunk, {window, attention_chunk}, {scalars[0], scalars[1], scalars[2], slopes, sinks, extent}, extent, T * extent,
          dtype, dtype};
  std::vector<Sequence> sequences;
  int64_t bytes = item_size(dtype);
  for (int64_t b = 0; b < B; b++)
    sequences.push_back({q + b * strides[0] * bytes, k + b * strides[3] * bytes, v + b * strides[6] * bytes,
                         out + b * Hq * T * Dv * bytes, nullptr, T, 0, relative ? relative + b * Hq * T * extent : nullptr, nullptr});
  attend(h, sequences, num_threads);
}

// q [T, Hq, D], k v [T, Hkv, D | Dv], caches [num_blocks, block_size, Hkv, D | Dv]; strides[12]: token and head of q, k, v;
// block, key and head of the caches. sizes[14]: T S Hq Hkv D Dv num_blocks block_size max_blocks window chunk attention_chunk
// extent num_slots. relative [T, Hq, extent] contiguous, or null.
// out [T, Hq, Dv] contiguous. scalars[3]: the first three fields of Scores. On a Fault `where` gets its index; nothing is written.
EXPORT int64_t detcompile_paged_attention(const char* q, const char* k, const char* v, char* k_cache, char* v_cache,
                                          const int64_t* slot_mapping, const int32_t* cu_seqlens, const int32_t* seq_lens,
                                          const int32_t* block_table, char* out, const int64_t* strides, const int64_t* sizes,
                                          const float* scalars, const float* slopes, const float* sinks, const float* relative,
                                          int32_t dtype, int32_t cache_dtype, int32_t num_threads, int64_t* where) {
  int64_t T = sizes[0], S = sizes[1], Hq = sizes[2], Hkv = sizes[3], D = sizes[4], Dv = sizes[5];
  Metadata meta{slot_mapping, cu_seqlens, seq_lens, block_table, T, S, sizes[8], sizes[6], sizes[7], sizes[13], {sizes[9], sizes[11]}};
  if (Fault fault = meta.check(where)) return fault;
  int32_t write_threads = meta.num_slots * Hkv * (D + Dv) < 65536 ? 1 : num_threads;  // a parallel region costs more
  write_cache(meta, k, dtype, strides + 2, k_cache, cache_dtype, strides + 6, Hkv, D, write_threads);
  write_cache(meta, v, dtype, strides + 4, v_cache, cache_dtype, strides + 9, Hkv, Dv, write_threads);
  Heads h{Hq, Hkv, D, Dv, strides[0], strides[1], Hq * Dv, Dv, strides[7], strides[8], strides[6], strides[10], strides[11],
          strides[9], meta.block_size, sizes[10], meta.visible,
          {scalars[0], scalars[1], scalars[2], slopes, sinks, sizes[12]}, Hq * sizes[12], sizes[12], dtype, cache_dtype};
  std::vector<Sequence> sequences;
  int64_t bytes = item_size(dtype);
  for (int64_t s = 0; s < S; s++) {
    int64_t first = cu_seqlens[s], num_queries = cu_seqlens[s + 1] - first;
    sequences.push_back({q + first * strides[0] * bytes, k_cache, v_cache, out + first * Hq * Dv * bytes,
                         block_table + s * meta.max_blocks, num_queries, seq_lens[s] - num_queries,
                         relative ? relative + first * Hq * sizes[12] : nullptr, nullptr});
  }
  attend(h, sequences, num_threads);
  int64_t used = cu_seqlens[S], padding = (T - used) * Hq * Dv * bytes;
  if (padding > 0) std::memset(out + used * Hq * Dv * bytes, 0, padding);
  return kFine;
}
