// The part of cooperative groups that kernels of one block need: the block, tiles of a warp, the active lanes, lanes
// with the same label. (Our own kernels do not use them; published ones do.) A grid of up to 256 blocks can be
// synchronised.
#pragma once
namespace cooperative_groups {

struct thread_block {
    static void sync(EMU_AT) { ::emu::barrier(-1 - l, ::emu::BARRIER_PLAIN, 0, f, l); }
    static unsigned thread_rank() { return (unsigned)::emu::cur->linear; }
    static unsigned size() { return blockDim.x * blockDim.y * blockDim.z; }
    static unsigned num_threads() { return size(); }
    static dim3 group_index() { return dim3(blockIdx.x, blockIdx.y, blockIdx.z); }
    static dim3 thread_index() { return dim3(::emu::cur->tid.x, ::emu::cur->tid.y, ::emu::cur->tid.z); }
    static dim3 group_dim() { return blockDim; }
    static dim3 dim_threads() { return blockDim; }
};
inline thread_block this_thread_block() { return {}; }

static __device__ unsigned emu_grid_tickets;            // blocks that have come to a grid barrier, ever
struct grid_group {
    static unsigned block_count() { return gridDim.x * gridDim.y * gridDim.z; }
    static unsigned long long thread_rank() {
        unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        return (unsigned long long)block * thread_block::size() + thread_block::thread_rank();
    }
    static unsigned long long size() { return (unsigned long long)block_count() * thread_block::size(); }
    static unsigned long long num_threads() { return size(); }
    static bool is_valid() { return true; }
    static void sync(EMU_AT) {
        thread_block::sync(f, l);
        if (thread_block::thread_rank() == 0) {
            __threadfence();
            unsigned target = (atomicAdd(&emu_grid_tickets, 1u) / block_count() + 1) * block_count();
            while (*(volatile unsigned*)&emu_grid_tickets < target) __nanosleep(0);
            __threadfence();
        }
        ::emu::barrier(-1 - (1 << 24) - l, ::emu::BARRIER_PLAIN, 0, f, l);
    }
};
inline grid_group this_grid() { return {}; }

template <unsigned N, class Parent = void> struct thread_block_tile {
    thread_block_tile() {}
    template <class P> thread_block_tile(thread_block_tile<N, P>) {}
    static_assert(N >= 1 && N <= 32 && (N & (N - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads");
    static unsigned thread_rank() { return (unsigned)::emu::cur->lane % N; }
    static unsigned meta_group_rank() { return (unsigned)::emu::cur->linear / N; }
    static unsigned meta_group_size() { return (thread_block::size() + N - 1) / N; }
    static constexpr unsigned size() { return N; }
    static constexpr unsigned num_threads() { return N; }
    static unsigned mask() {
        return N == 32 ? 0xffffffffu : ((1u << (N & 31)) - 1) << ((unsigned)::emu::cur->lane / N * N);
    }
    static void sync(EMU_AT) { ::emu::syncwarp(mask(), f, l); }
    template <class T> static T shfl(T v, int src, EMU_AT) { return __shfl_sync(mask(), v, src, N, f, l); }
    template <class T> static T shfl_xor(T v, int x, EMU_AT) { return __shfl_xor_sync(mask(), v, x, N, f, l); }
    template <class T> static T shfl_down(T v, unsigned d, EMU_AT) { return __shfl_down_sync(mask(), v, d, N, f, l); }
    template <class T> static T shfl_up(T v, unsigned d, EMU_AT) { return __shfl_up_sync(mask(), v, d, N, f, l); }
    static unsigned shift(unsigned votes) {
        return N == 32 ? votes : (votes >> ((unsigned)::emu::cur->lane / N * N)) & ((1u << (N & 31)) - 1);
    }
    static unsigned ballot(int p, EMU_AT) { return shift(__ballot_sync(mask(), p, f, l)); }
    static int any(int p, EMU_AT) { return __any_sync(mask(), p, f, l); }
    static int all(int p, EMU_AT) { return __all_sync(mask(), p, f, l); }
    template <class T> static unsigned match_any(T v, EMU_AT) { return shift(__match_any_sync(mask(), v, f, l)); }
    template <class T> static unsigned match_all(T v, int& all, EMU_AT) {
        return shift(__match_all_sync(mask(), v, &all, f, l));
    }
};
template <unsigned N, class Group> inline thread_block_tile<N, Group> tiled_partition(const Group&) { return {}; }

struct coalesced_group {
    unsigned lanes;
    unsigned size() const { return (unsigned)__popc(lanes); }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const { return (unsigned)__popc(lanes & ((1u << ::emu::cur->lane) - 1)); }
    int lane_of(unsigned rank) const {
        unsigned m = lanes;
        while (rank--) m &= m - 1;
        return __ffs((int)m) - 1;
    }
    void sync(EMU_AT) const { ::emu::syncwarp(lanes, f, l); }
    template <class T> T shfl(T v, unsigned rank, EMU_AT) const {
        return __shfl_sync(lanes, v, lane_of(rank), 32, f, l);
    }
    // Ranks, not lanes: the group's neighbours need not be the warp's.
    template <class T> T shfl_down(T v, unsigned d, EMU_AT) const {
        unsigned n = thread_rank() + d;
        return shfl(v, n < size() ? n : thread_rank(), f, l);
    }
    template <class T> T shfl_up(T v, unsigned d, EMU_AT) const {
        return shfl(v, thread_rank() >= d ? thread_rank() - d : thread_rank(), f, l);
    }
    template <class T> T shfl_xor(T v, unsigned x, EMU_AT) const {
        unsigned n = thread_rank() ^ x;
        return shfl(v, n < size() ? n : thread_rank(), f, l);
    }
    unsigned ranks(unsigned votes) const {             // bits of lanes to bits of ranks
        unsigned r = 0, at = 0;
        for (int i = 0; i < 32; i++)
            if (lanes >> i & 1) r |= (votes >> i & 1) << at++;
        return r;
    }
    unsigned ballot(int p, EMU_AT) const { return ranks(__ballot_sync(lanes, p, f, l)); }
    int any(int p, EMU_AT) const { return __any_sync(lanes, p, f, l); }
    int all(int p, EMU_AT) const { return __all_sync(lanes, p, f, l); }
    template <class T> unsigned match_any(T v, EMU_AT) const { return ranks(__match_any_sync(lanes, v, f, l)); }
};
inline coalesced_group coalesced_threads(EMU_AT) { return {__activemask(f, l)}; }

// The lanes of a group that name the same label.
template <class T> inline coalesced_group labeled_partition(const coalesced_group& g, T label, EMU_AT) {
    return {__match_any_sync(g.lanes, label, f, l)};
}
template <unsigned N, class P, class T>
inline coalesced_group labeled_partition(const thread_block_tile<N, P>& g, T label, EMU_AT) {
    return {__match_any_sync(g.mask(), label, f, l)};
}
template <class G> inline coalesced_group binary_partition(const G& g, bool side, EMU_AT) {
    return labeled_partition(g, (int)side, f, l);
}

// Any of the above, where the type does not tell.
struct thread_group {
    unsigned lanes;                                    // 0: the whole block
    thread_group(thread_block) : lanes(0) {}
    template <unsigned N, class P> thread_group(thread_block_tile<N, P> t) : lanes(t.mask()) {}
    thread_group(coalesced_group g) : lanes(g.lanes) {}
    unsigned size() const { return lanes ? (unsigned)__popc(lanes) : thread_block::size(); }
    unsigned num_threads() const { return size(); }
    unsigned thread_rank() const {
        return lanes ? coalesced_group{lanes}.thread_rank() : thread_block::thread_rank();
    }
    void sync(EMU_AT) const {
        if (lanes) ::emu::syncwarp(lanes, f, l);
        else thread_block::sync(f, l);
    }
};
inline thread_group tiled_partition(const thread_group&, unsigned n) {
    return coalesced_group{n == 32 ? 0xffffffffu : ((1u << n) - 1) << ((unsigned)::emu::cur->lane / n * n)};
}

#define EMU_GROUP_OP(name, expression) \
    template <class T = void> struct name { template <class A> A operator()(A a, A b) const { return expression; } };
EMU_GROUP_OP(plus, a + b) EMU_GROUP_OP(greater, a > b ? a : b) EMU_GROUP_OP(less, a < b ? a : b)
EMU_GROUP_OP(bit_and, a & b) EMU_GROUP_OP(bit_or, a | b) EMU_GROUP_OP(bit_xor, a ^ b)
template <class G, class T, class Op> inline T inclusive_scan(const G& g, T v, Op op, EMU_AT) {
    for (unsigned o = 1; o < g.size(); o *= 2) {
        T other = g.shfl_up(v, o, f, l);
        if (g.thread_rank() >= o) v = op(other, v);
    }
    return v;
}
template <class G, class T> inline T inclusive_scan(const G& g, T v, EMU_AT) {
    return inclusive_scan(g, v, plus<T>(), f, l);
}
template <class G, class T> inline T exclusive_scan(const G& g, T v, EMU_AT) {
    return inclusive_scan(g, v, plus<T>(), f, l) - v;
}
template <class G, class T, class Op> inline T reduce(const G& g, T v, Op op, EMU_AT) {   // a group may have 11 lanes
    return g.shfl(inclusive_scan(g, v, op, f, l), g.size() - 1, f, l);
}
template <class G> inline void sync(const G& g, EMU_AT) { g.sync(f, l); }

}
