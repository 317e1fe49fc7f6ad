// Products of few rows with MLX affine weights, y = x · Wᵀ: codes go from memory to registers and from there, as bf16
// values, straight into the tensor cores. `affine.py` describes the packed form, and its Triton kernels give a row the
// same bits.
//
// A warp holds 16 outputs and a slice of the inputs. A program has `tiles` times `inner` warps: neighbouring outputs,
// whose number is chosen so that the programs, one a processor, end together, and some slices of their inputs. A cluster
// of programs has all slices; its first program adds their sums up in order. Warps of one slice share its part of x,
// which the copy units bring to shared memory a few steps ahead.
//
// Defined where it is compiled: BITS 4 or 8, GROUP 32, 64 or 128; ROWS: x has up to so many, 8 to 64; THREADS: the most a
// program has; WIDE: four warps multiply together (wgmma), and read x from shared memory once, which pays for more than
// 16 rows.

typedef unsigned int u32;
typedef unsigned short u16;

constexpr int STEP = 128, BLOCK = 16, RUNS = 4;        // inputs packed together; outputs packed together; runs of 32
constexpr int PLANES = 16 / BITS, CHUNKS = BITS / 4;   // runs in a unit; pieces of 16 bytes of a thread's row and step
constexpr int GROUPS = STEP / GROUP;
constexpr int PAIR = 2, STAGES = 3;                    // steps of x that are brought together; such pairs held, not WIDE
constexpr int EIGHTS = ROWS / 8;
constexpr int ROW = PAIR * 2 * STEP + 16;              // bytes of a row of a pair: no two begin in the same banks
constexpr int ATOM = 128 * ROWS;                       // WIDE: bytes of 64 inputs of all rows, as wgmma reads them
constexpr int HELD = WIDE ? PAIR * 2 * ATOM : ROWS * ROW, RING = STAGES * HELD;
constexpr int BARRIERS = WIDE ? 1024 : 0;              // bytes before x: two barriers for each pair that has room

struct Params {
    const u16* x;         // bf16 [M, K], rows sx apart
    const u32* units;     // [blocks, steps, 16, 4 · BITS]
    const u32* words;     // [blocks, steps, 16, GROUPS]
    const u16* bias;      // bf16 [N], or null
    const u16* residual;  // bf16, rows sr apart, or null
    void* out;            // bf16, or float32 if wide; rows so apart
    int M, N, K, sx, so, sr, steps, blocks, tiles, slices, inner, stages, gated, wide, early;
};

struct Codes {
    uint4 q[2][CHUNKS];
    u32 words[2][GROUPS];
};

__device__ __forceinline__ uint4 fetched(const u32* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// What a thread takes of a step: units are stored so that 16 bytes in a row are what it gives to the tensor cores.
__device__ __forceinline__ void fetch(Codes& codes, const u32* units, const u32* words, int step) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++)
            codes.q[half][chunk] = fetched(units + (step * BLOCK + half * 8) * 4 * BITS + chunk * 16);
        const u32* at = words + (step * BLOCK + half * 8) * GROUPS;
        if constexpr (GROUPS == 1)
            asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(codes.words[half][0]) : "l"(at));
        else
#pragma unroll
            for (int two = 0; two < GROUPS; two += 2)
                asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];"
                             : "=r"(codes.words[half][two]), "=r"(codes.words[half][two + 1]) : "l"(at + two));
    }
}

__device__ __forceinline__ u32 fused(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Two codes of a register of two units to two values; the second of two codes of 4 bits in a byte comes out 16 times
// too large, which its scale makes good.
__device__ __forceinline__ u32 value(u32 units, int plane, const u32 (&scale)[2], u32 offset) {
    const bool second = BITS == 4 && plane % 2;
    const u32 shifted = plane * BITS >= 8 ? units >> 8 : units;
    return fused(shifted & (BITS == 8 ? 0x00FF00FF : second ? 0x00F000F0 : 0x000F000F), scale[second], offset);
}

// Of a run, what a thread gives to two products.
__device__ __forceinline__ void take_values(u32 (*a)[4], const Codes& codes, int run) {
    const int chunk = run / PLANES, plane = run % PLANES, group = run * GROUPS / RUNS;
    u32 scale[2][2], offset[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 word = codes.words[half][group];
        scale[half][0] = __byte_perm(word, 0, 0x1010);
        scale[half][1] = BITS == 4 ? fused(scale[half][0], 0x3D803D80, 0x80008000) : 0;  // 1/16 in bf16, -0
        offset[half] = __byte_perm(word, 0, 0x3232);
        const u32 q[4] = {codes.q[half][chunk].x, codes.q[half][chunk].y, codes.q[half][chunk].z, codes.q[half][chunk].w};
#pragma unroll
        for (int i = 0; i < 4; i++) a[i / 2][i % 2 * 2 + half] = value(q[i], plane, scale[half], offset[half]);
    }
}

#if WIDE
#define EIGHT(e) "+f"(s[e][0]), "+f"(s[e][1]), "+f"(s[e][2]), "+f"(s[e][3])

// Of 64 outputs by 16 inputs, four warps together; x is the descriptor of the inputs in shared memory.
__device__ __forceinline__ void add_product(float (&s)[EIGHTS][4], const u32 (&a)[4], unsigned long long x) {
    if constexpr (ROWS == 8)
        asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
                     : EIGHT(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
    if constexpr (ROWS == 16)
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
                     : EIGHT(0), EIGHT(1)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
    if constexpr (ROWS == 32)
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, "
                     "%19}, %20, 1, 1, 1, 0;"
                     : EIGHT(0), EIGHT(1), EIGHT(2), EIGHT(3)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
    if constexpr (ROWS == 64)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "
                     "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, "
                     "1, 1, 0;"
                     : EIGHT(0), EIGHT(1), EIGHT(2), EIGHT(3), EIGHT(4), EIGHT(5), EIGHT(6), EIGHT(7)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
}

__device__ __forceinline__ void add_step(float (&sums)[EIGHTS][4], const Codes& codes, u32 x) {
    // The matrix of x in shared memory: rows of 128 bytes, swizzled, by eights.
    const unsigned long long matrix = 1ull << 62 | 64ull << 32 | 1ull << 16 | x / 16;
    u32 a[2][4][4];  // half a step, and half of it under way
#pragma unroll
    for (int half = 0; half < 2; half++) {
        take_values(a[half], codes, half * 2), take_values(a[half] + 2, codes, half * 2 + 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; k++) add_product(sums, a[half][k], matrix + (half * ATOM + k * 32) / 16);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
}
#else
__device__ __forceinline__ void add_product(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// `x` is where this thread's row of an eight stands in shared memory, of each: what it hands to the tensor cores.
__device__ __forceinline__ void add_step(float (&sums)[EIGHTS][4], const Codes& codes, const u32 (&x)[EIGHTS], u32 at) {
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
        u32 a[2][4], b[EIGHTS][4];
#pragma unroll
        for (int e = 0; e < EIGHTS; e++)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(b[e][0]), "=r"(b[e][1]), "=r"(b[e][2]), "=r"(b[e][3])
                         : "r"(x[e] + at + run * 64));
        take_values(a, codes, run);
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) add_product(sums[e], a[k], b[e][2 * k], b[e][2 * k + 1]);
    }
}
#endif

#if WIDE
__device__ __forceinline__ void prepare(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void await(u32 barrier, int phase) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again; }"
                 :: "r"(barrier), "r"(phase) : "memory");
}
#endif

// A pair of steps of x: a warp a row, a thread 16 bytes of it. Inputs past the last are zeros.
__device__ __forceinline__ void bring(const Params& p, const u16* x, int inputs, u32 to, int tile) {
    const int lane = threadIdx.x % 32;
    const bool there = lane * 8 < inputs;
    for (int row = tile; row < p.M; row += p.tiles) {
        const u32 place = WIDE ? lane / 8 * ATOM + row * 128 + (lane % 8 ^ row % 8) * 16 : row * ROW + lane * 16;
        const u16* from = there ? x + (long long)row * p.sx + lane * 8 : p.x;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(to + place), "l"(from), "r"(there ? 16 : 0) : "memory");
    }
}

__device__ __forceinline__ float widened(u16 x) { return __uint_as_float((u32)x << 16); }

// silu(gate) · up, as Triton computes it.
__device__ __forceinline__ float gated(float gate, float up) {
    float power, quotient;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(-gate * 1.4426950408889634f));
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(gate), "f"(1.0f + power));
    return quotient * up;
}

__device__ __forceinline__ void put(const Params& p, int m, int n, float y) {
    if (p.residual) y += widened(p.residual[(long long)m * p.sr + n]);
    if (p.wide) {
        ((float*)p.out)[(long long)m * p.so + n] = y;
        return;
    }
    u16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(y));
    ((u16*)p.out)[(long long)m * p.so + n] = rounded;
}

// Sums are too small by 2^16.
__device__ __forceinline__ float whole(const Params& p, float sum, int n) {
    const float y = sum * 65536.0f;
    return p.bias && n < p.N ? y + widened(p.bias[n]) : y;
}

__device__ __forceinline__ void leave(const Params& p, const float (&sums)[EIGHTS][4], int block, int lane) {
    const int n = block * BLOCK + lane / 4;
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int m = 8 * e + lane % 4 * 2 + i;
            if (m >= p.M) continue;
            const float low = whole(p, sums[e][i], n), high = whole(p, sums[e][i + 2], n + 8);
            if (p.gated) {
                if (n + 8 < p.N) put(p, m, block * 8 + lane / 4, gated(low, high));
                continue;
            }
            if (n < p.N) put(p, m, n, low);
            if (n + 8 < p.N) put(p, m, n + 8, high);
        }
}

// All threads of a cluster.
__device__ __forceinline__ void all_wait(int parts) {
    if (parts == 1)
        __syncthreads();
    else
        asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}

// To that place in the shared memory of the cluster's first program.
__device__ __forceinline__ void hand_over(u32 here, const float (&sum)[4]) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(here));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                 :: "r"(there), "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) affine(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const int parts = p.slices / p.inner, part = blockIdx.x % parts;  // programs of a cluster, and which this is
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int tile = warp % p.tiles, own = warp / p.tiles;
    const int block = blockIdx.x / parts * p.tiles + tile, slice = part * p.inner + own;
    const int span = (p.steps + p.slices - 1) / p.slices;
    const int begin = slice * span, count = max(min(p.steps - begin, span), 0);
    // A warp past the last block reads that one again, and stores nothing.
    const long long first = (long long)min(block, p.blocks - 1) * p.steps + begin;
    const u32* units = p.units + (first * BLOCK + lane / 4) * 4 * BITS + lane % 4 * 4;
    const u32* words = p.words + (first * BLOCK + lane / 4) * GROUPS;

    const u32 base = (u32)__cvta_generic_to_shared(shared);
#if !WIDE
    if (parts > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#else
    const u32 full = base + own * p.stages * 16;  // and behind each, its other one: empty
    if (threadIdx.x == 0)
        for (int i = 0; i < p.inner * p.stages; i++)
            prepare(base + i * 16, p.tiles * 32), prepare(base + i * 16 + 8, p.tiles);
    __syncthreads();
#endif
    if (p.early) asm volatile("griddepcontrol.launch_dependents;");
    Codes codes[PAIR];  // a step in turn, and the next under way
#pragma unroll
    for (int d = 0; d < PAIR; d++)
        if (d < count) fetch(codes[d], units, words, d);
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const u16* x = p.x + begin * STEP;
    int inputs = min(p.K - begin * STEP, count * STEP);
    u32 now = 0, later = 0;  // bytes into the ring
    float sums[EIGHTS][4] = {};
#if WIDE
    // Each warp waits for what it needs alone, and so some unpack while others multiply.
    const u32 ring = base + BARRIERS + own * p.stages * HELD, end = p.stages * HELD;
    auto bring_next = [&] {
        if (inputs > 0) bring(p, x, inputs, ring + later, tile);
        x += PAIR * STEP, inputs -= PAIR * STEP, later = later == end - HELD ? 0 : later + HELD;
    };
    int slot = 0, phase = 0, next = 0, next_phase = 0;  // of the pair in turn, and of the next that is brought
    auto bring_and_tell = [&] {
        bring_next();
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(full + next * 16) : "memory");
        if (++next == p.stages) next = 0, next_phase ^= 1;
    };
    for (int i = 0; i < p.stages && inputs > 0; i++) bring_and_tell();
    for (int left = count; left > 0; left -= PAIR) {
        if (left <= count - 2 * PAIR && inputs > 0) {  // the pair before the last is no more needed
            await(full + next * 16 + 8, next_phase ^ 1);
            bring_and_tell();
        }
        await(full + slot * 16, phase);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        add_step(sums, codes[0], ring + now);
        if (left > 2) fetch(codes[0], units, words, 2);
        if (left > 1) add_step(sums, codes[1], ring + now + 2 * ATOM);
        if (left > 3) fetch(codes[1], units, words, 3);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(full + slot * 16 + 8) : "memory");
        if (++slot == p.stages) slot = 0, phase ^= 1;
        now = now == end - HELD ? 0 : now + HELD;
        units += PAIR * BLOCK * 4 * BITS, words += PAIR * BLOCK * GROUPS;
    }
#else
    // The warps of a slice go pair by pair together, which needs the least of x: the next kernel's programs have room.
    const u32 ring = base + own * RING;
    auto bring_next = [&] {
        if (inputs > 0) bring(p, x, inputs, ring + later, tile);
        asm volatile("cp.async.commit_group;");
        x += PAIR * STEP, inputs -= PAIR * STEP, later = later == RING - HELD ? 0 : later + HELD;
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) bring_next();
    u32 rows[EIGHTS];
#pragma unroll
    for (int e = 0; e < EIGHTS; e++) rows[e] = ring + min(8 * e + lane % 8, p.M - 1) * ROW + lane / 8 * 16;
    auto one_step = [&](int i, int left) {  // of a pair
        if (i == 0) {
            asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
            asm volatile("bar.sync %0, %1;" :: "r"(1 + own), "r"(p.tiles * 32) : "memory");
            bring_next();
        }
        add_step(sums, codes[i], rows, now + i * 2 * STEP);
        if (i == PAIR - 1) now = now == RING - HELD ? 0 : now + HELD;
        if (left > PAIR) fetch(codes[i], units, words, i + PAIR);
    };
    int left = count;  // steps
    for (; left >= PAIR; left -= PAIR) {
        one_step(0, left), one_step(1, left - 1);
        units += PAIR * BLOCK * 4 * BITS, words += PAIR * BLOCK * GROUPS;
    }
    if (left) one_step(0, 0);
#endif

    if (p.slices > 1) {
        // [slices - 1, tiles, EIGHTS, 32], of the cluster's first program.
#if WIDE
        float4* left = (float4*)(shared + BARRIERS);
        all_wait(parts);  // nobody reads x any more
#else
        float4* left = (float4*)(shared + p.inner * RING);
        if (parts > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");  // all programs have begun
#endif
        if (slice) {
            const u32 here = (u32)__cvta_generic_to_shared(left + ((slice - 1) * p.tiles + tile) * EIGHTS * 32 + lane);
#pragma unroll
            for (int e = 0; e < EIGHTS; e++) hand_over(here + e * 32 * sizeof(float4), sums[e]);
        }
        all_wait(parts);
        if (slice) return;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[e][i] = 0.0f + sums[e][i];  // as a sum that begins with 0
            for (int s = 1; s < p.slices; s++) {
                const float4 more = left[((s - 1) * p.tiles + tile) * EIGHTS * 32 + e * 32 + lane];
                sums[e][0] += more.x, sums[e][1] += more.y, sums[e][2] += more.z, sums[e][3] += more.w;
            }
        }
    }
    if (block < p.blocks) leave(p, sums, block, lane);
}
