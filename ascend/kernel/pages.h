// Keys and values into their slots, and pages into other pages: copies through UB, no arithmetic.
//
// The scalar unit reads slots and page numbers straight from global memory: the host wrote them before the launch.
// Both kernels move 16-bit elements and never look at them.
#pragma once

#include "common.h"

namespace paged_kv {

using Element = int16_t;

// key, value [num_tokens, num_kv_heads, head_dim] to the pages' slots; a negative slot's token is left out.
class WritePages {
public:
    __aicore__ inline WritePages(GM_ADDR key, GM_ADDR value, GM_ADDR key_pages, GM_ADDR value_pages, GM_ADDR slots,
                                 const WriteTiling& tiling)
        : t(tiling), row(tiling.num_kv_heads * tiling.head_dim) {
        from[0].SetGlobalBuffer(reinterpret_cast<__gm__ Element*>(key));
        from[1].SetGlobalBuffer(reinterpret_cast<__gm__ Element*>(value));
        to[0].SetGlobalBuffer(reinterpret_cast<__gm__ Element*>(key_pages));
        to[1].SetGlobalBuffer(reinterpret_cast<__gm__ Element*>(value_pages));
        slot.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(slots));
        pipe.InitBuffer(tiles, 2, t.tile_tokens * row * uint32_t(sizeof(Element)));
    }

    __aicore__ inline void Process() {
        const uint32_t stride = GetBlockNum() * t.tile_tokens;
        for (uint32_t token = GetBlockIdx() * t.tile_tokens; token < t.num_tokens; token += stride)
            for (uint32_t which = 0; which < 2; ++which) Scatter(which, token, Min(t.tile_tokens, t.num_tokens - token));
    }

private:
    __aicore__ inline void Scatter(uint32_t which, uint32_t token, uint32_t count) {
        LocalTensor<Element> tile = tiles.AllocTensor<Element>();
        DataCopy(tile, from[which][uint64_t(token) * row], count * row);
        tiles.EnQue(tile);
        tile = tiles.DeQue<Element>();
        const auto gap = uint32_t((t.head_stride - t.head_dim) * sizeof(Element));
        const DataCopyExtParams heads(t.num_kv_heads, uint32_t(t.head_dim * sizeof(Element)), 0, gap, 0);
        for (uint32_t i = 0; i < count; ++i) {
            const int64_t target = slot.GetValue(token + i);
            if (target < 0) continue;
            const uint64_t place = uint64_t(target) / t.page_size * t.page_stride +
                                   uint64_t(target) % t.page_size * t.token_stride;
            DataCopyPad(to[which][place], tile[i * row], heads);
        }
        tiles.FreeTensor(tile);
    }

    WriteTiling t;
    uint32_t row;
    TPipe pipe;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> tiles;
    GlobalTensor<Element> from[2], to[2];
    GlobalTensor<int64_t> slot;
};

// Pairs (source, destination) of pages. No destination is another pair's page.
class CopyPages {
public:
    __aicore__ inline CopyPages(GM_ADDR key_pages, GM_ADDR value_pages, GM_ADDR copies, const CopyTiling& tiling)
        : t(tiling) {
        pages[0].SetGlobalBuffer(reinterpret_cast<__gm__ Element*>(key_pages));
        pages[1].SetGlobalBuffer(reinterpret_cast<__gm__ Element*>(value_pages));
        pair.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(copies));
        pipe.InitBuffer(tiles, 2, t.chunk_bytes);
    }

    __aicore__ inline void Process() {
        const auto page = uint64_t(t.page_bytes / sizeof(Element));
        const auto chunk = uint32_t(t.chunk_bytes / sizeof(Element));
        for (uint32_t task = GetBlockIdx(); task < 2 * t.num_copies; task += GetBlockNum()) {
            const uint64_t source = uint64_t(pair.GetValue(task / 2 * 2)) * page;
            const uint64_t destination = uint64_t(pair.GetValue(task / 2 * 2 + 1)) * page;
            const GlobalTensor<Element>& array = pages[task % 2];
            for (uint64_t done = 0; done < page; done += chunk) {
                const auto count = uint32_t(page - done < chunk ? page - done : chunk);
                LocalTensor<Element> tile = tiles.AllocTensor<Element>();
                DataCopy(tile, array[source + done], count);
                tiles.EnQue(tile);
                tile = tiles.DeQue<Element>();
                DataCopy(array[destination + done], tile, count);
                tiles.FreeTensor(tile);
            }
        }
    }

private:
    CopyTiling t;
    TPipe pipe;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> tiles;
    GlobalTensor<Element> pages[2];
    GlobalTensor<int64_t> pair;
};

}  // namespace paged_kv
