// What the emulation refuses, each rule with the part of the Ascend C documentation it comes from.
#pragma once

namespace emu {

struct Rule {
    const char* name;
    const char* source;
};

namespace rule {

// Operands.
constexpr Rule ALIGN{"align", "general constraints, table 2: an operand in UB starts at a multiple of 32 bytes"};
constexpr Rule BOUNDS{"bounds", "LocalTensor: an instruction stays inside the buffer it was given"};
constexpr Rule UNINITIALISED{"uninitialised", "AllocTensor, TBuf: a buffer's content is undefined until written"};
constexpr Rule TAIL{"padding-tail", "DataCopyPad: without isPad, what fills the last 32 bytes is undefined"};
constexpr Rule FREED{"use-after-free", "FreeTensor: a freed tensor may not be used"};
constexpr Rule OVERLAP{"overlap", "general constraints: source and destination are the same or disjoint, and no "
                                  "iteration reads what an earlier one of the same instruction wrote"};
// Shape of a vector instruction.
constexpr Rule MASK{"mask", "general constraints: mask is 1 to 64 lanes of 32 bits, 1 to 128 of 16"};
constexpr Rule REPEAT{"repeat", "general constraints: repeatTime is 0 to 255 (the hardware keeps 8 bits)"};
constexpr Rule STRIDE{"stride", "BinaryRepeatParams, UnaryRepeatParams: repeat strides have 8 bits"};
constexpr Rule BRCB_STRIDE{"brcb-stride", "Brcb: dstBlkStride is not 0"};
constexpr Rule DTYPE{"dtype", "each instruction's table of supported types for Atlas A2"};
constexpr Rule ROUND{"round-mode", "Cast: table of types and round modes"};
// Copies.
constexpr Rule COPY_SIZE{"copy-size", "DataCopy: the bytes moved are a positive multiple of 32"};
constexpr Rule COPY_BLOCKS{"copy-blocks", "DataCopyParams, DataCopyExtParams: blockCount is 1 to 4095"};
constexpr Rule COPY_LENGTH{"copy-length", "DataCopyExtParams: blockLen is 1 to 2097151 bytes"};
constexpr Rule PAD{"pad-width", "DataCopyPadExtParams: each side pads by at most 32 bytes"};
constexpr Rule GM_BOUNDS{"gm-bounds", "GlobalTensor: access outside the kernel's arrays (error 507015 on a device)"};
constexpr Rule GM_CONST{"gm-const", "the launcher: an input array is only read"};
constexpr Rule GM_RACE{"gm-race", "blocks run in any order: one may not touch what another writes in the same launch"};
constexpr Rule GM_STALE{"gm-stale", "GlobalTensor.GetValue: the scalar cache does not see what the kernel wrote"};
// Buffers and queues.
constexpr Rule CAPACITY{"ub-capacity", "TPipe.InitBuffer: the buffers fit in the 188160 usable bytes of UB"};
constexpr Rule BUFFERS{"buffer-count", "TPipe.InitBuffer: at most 8 buffers for each TPosition"};
constexpr Rule QUEUE_ALLOC{"queue-alloc", "AllocTensor: all buffers of the queue are taken (FreeTensor is missing)"};
constexpr Rule QUEUE_DEPTH{"queue-depth", "TQue: at most `depth` EnQue without a DeQue"};
constexpr Rule QUEUE_EMPTY{"queue-empty", "DeQue: nothing was put into the queue (EnQue is missing)"};
constexpr Rule QUEUE_ORDER{"queue-order", "TQue: AllocTensor, EnQue, DeQue, FreeTensor in this order on its own buffers"};
constexpr Rule QUEUE_LEFT{"queue-left", "TQue: at the kernel's end every buffer is free again"};
// Order.
constexpr Rule RACE_RAW{"race-read-after-write", "pipes run on their own: SetFlag and WaitFlag, or a queue, order them"};
constexpr Rule RACE_WAR{"race-write-after-read", "pipes run on their own: SetFlag and WaitFlag, or a queue, order them"};
constexpr Rule RACE_WAW{"race-write-after-write", "pipes run on their own: SetFlag and WaitFlag, or a queue, order them"};
constexpr Rule BARRIER{"barrier", "PipeBarrier: dependent instructions of one pipe have a barrier between them"};
constexpr Rule FLAG_SET{"flag-set-twice", "SetFlag: the flag is already set"};
constexpr Rule FLAG_WAIT{"flag-never-set", "WaitFlag: nobody set the flag; the core waits for ever"};
constexpr Rule FLAG_ID{"flag-id", "SetFlag: ids are 0 to 5 (6 and 7 are reserved)"};
constexpr Rule FLAG_LEFT{"flag-left", "SetFlag: at the kernel's end every flag has been waited for"};

}  // namespace rule
}  // namespace emu
