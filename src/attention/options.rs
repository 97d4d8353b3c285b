//! What the caller chooses: masks, biases, and where each sequence's pages lie.

use crate::kernels::Isa;

/// Options of [`paged_attention`](super::paged_attention); the default is plain causal attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions<'a> {
    /// Factor of `query · key`; `None` is `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Query `i` of `q` in a sequence of length `L` sits at position `L - q + i` and sees keys up
    /// to that position. Without it every query sees every key (or those its window leaves).
    pub causal: bool,
    /// Keys to the left of its own position that a query sees, so that a window of `W` tokens
    /// that counts the query itself is `W - 1`; -1 switches it off.
    pub window_left: i64,
    /// `cap · tanh(logit / cap)` on the scaled logit, before bias and mask; 0 switches it off.
    pub logits_soft_cap: f32,
    /// Bias `-slope · (query position - key position)`, one slope per query head.
    pub alibi_slopes: Option<&'a [f32]>,
    /// One more logit per query head in the softmax's denominator, without a value.
    pub sinks: Option<&'a [f32]>,
    /// Instruction set of this call; `None` is the process's choice ([`Isa::current`]).
    pub isa: Option<Isa>,
}

impl Default for AttentionOptions<'_> {
    fn default() -> Self {
        Self {
            scale: None,
            causal: true,
            window_left: -1,
            logits_soft_cap: 0.0,
            alibi_slopes: None,
            sinks: None,
            isa: None,
        }
    }
}

/// Where a batch's sequences lie: `B` of them, their rows one after another in `query`.
#[derive(Clone, Copy, Debug)]
pub struct BatchTables<'a> {
    /// `[B, max_pages]`, dense: the physical page of each logical page. Entries behind a
    /// sequence's last page, or wholly left of what its window can see, are not looked at.
    pub block_table: &'a [i32],
    /// Entries of one row of `block_table`.
    pub max_pages: usize,
    /// `[B]`: keys of each sequence, the new tokens included.
    pub seq_lens: &'a [i32],
    /// `[B + 1]`: sequence `b` owns query rows `cu_seqlens_q[b]..cu_seqlens_q[b + 1]`. Rows behind
    /// the last belong to no sequence and see no key.
    pub cu_seqlens_q: &'a [i32],
}
