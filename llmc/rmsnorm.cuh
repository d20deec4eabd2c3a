/*
rmsnorm: divide a row by its root mean square. Equations in rmsnorm.h; what differs here:

  forward   up to a warp shares a row; its second pass finds the row in the cache. residual_rmsnorm_forward reads a and
            b, writes their sum, and normalises the sum as it was rounded: bit for bit residual_forward followed by
            rmsnorm_forward, without reading the sum again.
  backward  a warp takes rows one after another. Each lane adds dweight for its own columns in fp32, in shared memory
            where a row fits (no barrier: no other lane touches them), else in the workspace; the partial sums of all
            blocks are then added in order. How rows are shared out depends on N and C alone.
  numerics  sums in fp32; y and dx rounded once each
  traffic   forward C in, C out (with the residual 2C in, 2C out); backward 4C in (dx included), C out, and
            RMSNORM_BLOCKS C fp32 out and in
*/
#ifndef LLMC_RMSNORM_CUH
#define LLMC_RMSNORM_CUH

// y_sum and b NULL: the row is a itself.
template <int W>
static __global__ void rmsnorm_forward_kernel(int lanes, floatX *y_sum, floatX *y, real *rstd, const floatX *a,
                                              const floatX *b, const floatX *weight, int N, int C, real eps) {
    unsigned n = row_index(lanes);
    size_t row = n * (size_t)C;
    int lane = row_lane(lanes);
    bool active = n < (unsigned)N;
    const floatX *x = b ? y_sum : a;
    float sum = 0, v[W], w[W];
    if (active)
        for (int c = lane * W; c < C; c += lanes * W) {
            load<W>(v, a + row + c);
            if (b) {
                load<W>(w, b + row + c);
                UNROLL
                for (int k = 0; k < W; k++) v[k] += w[k];
                store<W>(y_sum + row + c, v);
                load<W>(v, y_sum + row + c); // as rounded
            }
            UNROLL
            for (int k = 0; k < W; k++) sum += v[k] * v[k];
        }
    sum = lanes_sum(sum, lanes);
    if (!active) return;
    float r = 1 / sqrtf(sum / (float)C + eps);
    for (int c = lane * W; c < C; c += lanes * W) {
        load<W>(v, x + row + c);
        load<W>(w, weight + c);
        UNROLL
        for (int k = 0; k < W; k++) v[k] = v[k] * r * w[k];
        store<W>(y + row + c, v);
    }
    if (lane == 0) rstd[n] = r;
}

static inline void rmsnorm_forward(floatX *y, real *rstd, const floatX *x, const floatX *weight, int N, int C,
                                   real eps) {
    bool wide = packed((size_t)C, y, x, weight);
    floatX *none = nullptr;
    LAUNCH_ROWS(rmsnorm_forward_kernel, wide, N, C, none, y, rstd, x, (const floatX *)none, weight, N, C, eps);
}

static inline void residual_rmsnorm_forward(floatX *y_sum, floatX *norm, real *rstd, const floatX *a, const floatX *b,
                                            const floatX *weight, int N, int C, real eps) {
    bool wide = packed((size_t)C, y_sum, norm, a, b, weight);
    LAUNCH_ROWS(rmsnorm_forward_kernel, wide, N, C, y_sum, norm, rstd, a, b, weight, N, C, eps);
}

#ifndef RMSNORM_BLOCKS // blocks of the backward; fewer in tests
#define RMSNORM_BLOCKS 512
#endif
enum { RMSNORM_WARPS = 4, RMSNORM_SHARED_BYTES = 48 << 10 };

static inline size_t rmsnorm_workspace_bytes(int C) { return RMSNORM_BLOCKS * (size_t)C * sizeof(real); }

// How many warps a block has: as many sums of dweight as its shared memory holds; 0: not one.
static inline int rmsnorm_warps(int C) { return min_int(RMSNORM_WARPS, RMSNORM_SHARED_BYTES / (int)sizeof(float) / C); }

// A block's part of the rows, its warps taking turns. partial (gridDim.x, C); shared false: one warp, and no room
template <int W>
static __global__ void rmsnorm_backward_kernel(floatX *dx, float *partial, const floatX *dy, const floatX *x,
                                               const floatX *weight, const real *rstd, int N, int C, bool shared) {
    DYNAMIC_SHARED(float, sums); // (warps, C)
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    int begin = (int)((int64_t)N * blockIdx.x / gridDim.x), end = (int)((int64_t)N * (blockIdx.x + 1) / gridDim.x);
    float *total = partial + blockIdx.x * (size_t)C, *dw = shared ? sums + (size_t)warp * (size_t)C : total;
    float d[W], v[W], w[W], g[W];
    for (int c = lane; c < C; c += WARP) dw[c] = 0;
    __syncwarp();
    for (int n = begin + warp; n < end; n += warps) {
        size_t row = (size_t)n * (size_t)C;
        float r = rstd[n], dot = 0;
        for (int c = lane * W; c < C; c += WARP * W) {
            load<W>(d, dy + row + c);
            load<W>(v, x + row + c);
            load<W>(w, weight + c);
            UNROLL
            for (int k = 0; k < W; k++) dot += d[k] * w[k] * v[k];
        }
        float mean = lanes_sum(dot, WARP) * r / (float)C; // mean_j(g[j] z[j])
        for (int c = lane * W; c < C; c += WARP * W) {
            float sum[W];
            load<W>(d, dy + row + c);
            load<W>(v, x + row + c);
            load<W>(w, weight + c);
            load<W>(g, dx + row + c);
            load_fp32<W>(sum, dw + c);
            UNROLL
            for (int k = 0; k < W; k++) {
                float z = v[k] * r;
                sum[k] += d[k] * z;                   // weight in y = z weight
                g[k] += r * (d[k] * w[k] - z * mean); // r in y = x r weight
            }
            store_fp32<W>(dw + c, sum);
            store<W>(dx + row + c, g);
        }
    }
    if (!shared) return;
    __syncthreads();
    for (int c = (int)threadIdx.x; c < C; c += (int)blockDim.x) {
        float sum = 0;
        for (int i = 0; i < warps; i++) sum += sums[(size_t)i * (size_t)C + c];
        total[c] = sum;
    }
}

static inline void rmsnorm_backward(floatX *dx, grad_t *dweight, const floatX *dy, const floatX *x,
                                    const floatX *weight, const real *rstd, int N, int C) {
    float *partial = ops_workspace_take(rmsnorm_workspace_bytes(C));
    int warps = rmsnorm_warps(C), threads = max_int(warps, 1) * WARP;
    int parts = min_int(RMSNORM_BLOCKS, (N + max_int(warps, 1) - 1) / max_int(warps, 1));
    size_t bytes = (size_t)warps * (size_t)C * sizeof(float);
    if (packed((size_t)C, dx, dy, x, weight))
        LAUNCH((rmsnorm_backward_kernel<PACK>), parts, threads, bytes, dx, partial, dy, x, weight, rstd, N, C,
               warps > 0);
    else LAUNCH((rmsnorm_backward_kernel<1>), parts, threads, bytes, dx, partial, dy, x, weight, rstd, N, C, warps > 0);
    column_sum(dweight, partial, parts, C);
}
#endif
