// Keys and values of one sequence and KV head on their way into UB, through the sequence's row of the block table.
//
// One queue, two buffers: while a tile is worked on, the next one is on its way (K0 V0 K1 V1 …). Tiles begin at any
// token, not at a page, so only computed tokens are ever read and none that left a window is looked up.
#pragma once

#include "common.h"

namespace paged_kv {

template <typename T>
class Tiles {
public:
    __aicore__ inline Tiles(TPipe& pipe, const AttendTiling& tiling, GM_ADDR key_pages, GM_ADDR value_pages,
                            GM_ADDR block_table)
        : t(tiling), dim(tiling.shape.head_dim) {
        key.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(key_pages));
        value.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(value_pages));
        table.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(block_table));
        pipe.InitBuffer(tiles, 2, t.tile_tokens * dim * uint32_t(sizeof(T)));
        pipe.InitBuffer(tableBuffer, t.table_chunk * uint32_t(sizeof(int32_t)));
        tableChunk = tableBuffer.template Get<int32_t>();
    }

    __aicore__ inline void Begin(uint32_t of_sequence, uint32_t of_head) {
        sequence = of_sequence, head = of_head;
        chunkStart = t.shape.table_width;  // nothing of this sequence's table is here
    }

    __aicore__ inline void Keys(uint32_t token, uint32_t count) { Load(key, token, count); }
    __aicore__ inline void Values(uint32_t token, uint32_t count) { Load(value, token, count); }
    __aicore__ inline LocalTensor<T> Next() { return tiles.template DeQue<T>(); }
    __aicore__ inline void Done(const LocalTensor<T>& tile) { tiles.FreeTensor(tile); }

private:
    // Keys or values of `count` tokens from `token` on, page by page.
    __aicore__ inline void Load(const GlobalTensor<T>& pages, uint32_t token, uint32_t count) {
        LocalTensor<T> tile = tiles.template AllocTensor<T>();
        const DataCopyPadExtParams<T> unpadded;
        for (uint32_t done = 0; done < count;) {
            const uint32_t position = token + done, offset = position % t.shape.page_size;
            const uint32_t rows = Min(count - done, t.shape.page_size - offset);
            const uint64_t start = uint64_t(Page(position / t.shape.page_size)) * t.page_stride +
                                   head * t.head_stride + offset * t.token_stride;
            const bool dense = t.token_stride == dim;
            const DataCopyExtParams shape(dense ? 1 : rows, (dense ? rows : 1) * dim * uint32_t(sizeof(T)),
                                          dense ? 0 : uint32_t(t.token_stride - dim) * uint32_t(sizeof(T)), 0, 0);
            DataCopyPad(tile[done * dim], pages[start], shape, unpadded);
            done += rows;
        }
        tiles.EnQue(tile);
    }

    // The page at `index` of the sequence's table, whose rows come to UB in chunks.
    __aicore__ inline uint32_t Page(uint32_t index) {
        if (index < chunkStart || index >= chunkStart + t.table_chunk) {
            chunkStart = index;
            const uint32_t count = Min(t.table_chunk, t.shape.table_width - index);
            SetFlag<HardEvent::S_MTE2>(EVENT_ID0);  // the scalar unit has read the last chunk: MTE2 may replace it
            WaitFlag<HardEvent::S_MTE2>(EVENT_ID0);
            DataCopyPad(tableChunk, table[uint64_t(sequence) * t.shape.table_width + index], OneBlock<int32_t>(count),
                        DataCopyPadExtParams<int32_t>());
            SetFlag<HardEvent::MTE2_S>(EVENT_ID0);  // MTE2 has brought the chunk: the scalar unit may read it
            WaitFlag<HardEvent::MTE2_S>(EVENT_ID0);
        }
        return uint32_t(tableChunk.GetValue(index - chunkStart));
    }

    AttendTiling t;
    uint32_t dim, sequence = 0, head = 0, chunkStart = 0;
    TQue<TPosition::VECIN, 2> tiles;
    TBuf<TPosition::VECIN> tableBuffer;
    GlobalTensor<T> key, value;
    GlobalTensor<int32_t> table;
    LocalTensor<int32_t> tableChunk;
};

}  // namespace paged_kv
