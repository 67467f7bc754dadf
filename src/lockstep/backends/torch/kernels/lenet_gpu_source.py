"""The CUDA source of LeNet's kernels (`lenet_gpu.py`), with shapes and the division of work as constants.

- A block computes one image, from shared memory; a thread computes 2 x 2 outputs, which are one pool, of some channels,
  with all that it needs of an input channel in registers. So an image's results do not depend on the others.
- For the backward pass, four bits of each pool say which of its outputs were positive.
- The gradient of the weights is summed up over a few images by each block, and over the blocks in their order.
"""

SHAPES = """
#define PH ((H - K + 1) / 2)  // rows and columns of a pooled image
#define PW ((W - K + 1) / 2)
#define TH ((2 * PH + K) / 2)  // 2 x 2 tiles of the part of an input that is used
#define TW ((2 * PW + K) / 2)
#define GH (2 * TH + K - 1)  // a gradient with zeros around it
#define GW (2 * TW + K - 1)
#define EVEN(n) ((n) + (n) % 2)  // rows are read two numbers at a time
#define PADDED(n, of) (((n) + (of) - 1) / (of) * (of))
#define WEIGHTS (O * C * K * K)
"""

ACCUMULATE = """
template <int ROW> __device__ void read(float (&patch)[K + 1][K + 1], const float* corner) {
    #pragma unroll
    for (int y = 0; y <= K; y++)
        #pragma unroll
        for (int x = 0; x <= K; x += 2) {
            float2 pair = *(const float2*)(corner + y * ROW + x);
            patch[y][x] = pair.x;
            if (x < K) patch[y][x + 1] = pair.y;
        }
}

template <int CHANNELS, int OUT>
__device__ void accumulate(float (&sums)[OUT][4], const float (&patch)[K + 1][K + 1], const float* kernels) {
    #pragma unroll
    for (int y = 0; y < K; y++)
        #pragma unroll
        for (int x = 0; x < K; x++)
            #pragma unroll
            for (int o = 0; o < OUT; o += 4) {
                float4 four = *(const float4*)(kernels + (y * K + x) * CHANNELS + o);
                float weights[4] = {four.x, four.y, four.z, four.w};
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    sums[o + i][0] += weights[i] * patch[y][x];
                    sums[o + i][1] += weights[i] * patch[y][x + 1];
                    sums[o + i][2] += weights[i] * patch[y + 1][x];
                    sums[o + i][3] += weights[i] * patch[y + 1][x + 1];
                }
            }
}
"""

# The threads of a block are GROUPS groups; each accumulates its share of the channels, and the first adds the others'.
ADD_GROUPS = """
template <int OUT> __device__ void add_groups(float (&sums)[OUT][4], float* shared, int group, int thread, int size) {
    __syncthreads();
    for (int other = 1; other < GROUPS; other++) {
        #pragma unroll
        for (int i = 0; i < 4 * OUT; i++)
            if (group == other) shared[i * size + thread] = sums[i / 4][i % 4];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 4 * OUT; i++)
            if (group == 0) sums[i / 4][i % 4] += shared[i * size + thread];
        __syncthreads();
    }
}
"""

# The weights in the order in which blocks copy them to shared memory, with zeros where there are fewer channels.
ARRANGED = """
#define OP PADDED(O, OT)
#define CP PADDED(C, CT)

extern "C" __global__ void arranged(float* forward, float* backward, const float* weight) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < C * K * K * OP) {
        int o = at % OP, k = at / OP % (K * K), c = at / (OP * K * K);
        forward[at] = o < O ? weight[(o * C + c) * K * K + k] : 0;
    }
    if (at < O * K * K * CP) {
        int c = at % CP, k = at / CP % (K * K), o = at / (CP * K * K);
        backward[at] = c < C ? weight[(o * C + c) * K * K + K * K - 1 - k] : 0;
    }
}
"""

POOLED = """
#define ROW EVEN(W)
#define OP PADDED(O, OT)

#define SIZE (PH * PW * (OP / OT))  // threads of a group

extern "C" __global__ void pooled(
    float* out, unsigned char* signs, const float* X, const float* arranged, const float* bias
) {
    alignas(16) __shared__ float image[C * H * ROW + 2];
    alignas(16) __shared__ float kernels[STAGED * K * K * OP];
    int group = threadIdx.x / SIZE, thread = threadIdx.x % SIZE;
    int pool = thread % (PH * PW), first = thread / (PH * PW) * OT;
    int top = pool / PW * 2, left = pool % PW * 2;
    const float* from = X + blockIdx.x * (C * H * W);
    for (int i = threadIdx.x; i < C * H * W; i += blockDim.x) image[i / W * ROW + i % W] = from[i];
    float sums[OT][4];
    #pragma unroll
    for (int o = 0; o < OT; o++)
        for (int i = 0; i < 4; i++) sums[o][i] = group == 0 && first + o < O ? bias[first + o] : 0;
    for (int begin = 0; begin < C; begin += STAGED) {
        const float4* staged = (const float4*)(arranged + begin * K * K * OP);
        __syncthreads();
        for (int i = threadIdx.x; i < STAGED * K * K * OP / 4; i += blockDim.x) ((float4*)kernels)[i] = staged[i];
        __syncthreads();
        for (int c = group; c < STAGED; c += GROUPS) {
            float patch[K + 1][K + 1];
            read<ROW>(patch, image + ((begin + c) * H + top) * ROW + left);
            accumulate<OP, OT>(sums, patch, kernels + c * K * K * OP + first);
        }
    }
#if GROUPS > 1
    add_groups<OT>(sums, kernels, group, thread, SIZE);
    if (group > 0) return;
#endif
    #pragma unroll
    for (int o = 0; o < OT; o++) {
        float total = 0;
        int bits = 0;
        for (int i = 0; i < 4; i++) {
            bits |= (sums[o][i] > 0) << i;
            total += sums[o][i] > 0 ? sums[o][i] : 0;
        }
        int at = (blockIdx.x * O + first + o) * (PH * PW) + pool;
        if (first + o < O) {
            out[at] = total * 0.25f;
            signs[at] = bits;
        }
    }
}
"""

INPUT_GRADIENT = """
#define ROW EVEN(GW)
#define CP PADDED(C, CT)

#define SIZE (TH * TW * (CP / CT))  // threads of a group

extern "C" __global__ void input_gradient(
    float* out, const float* grad, const unsigned char* signs, const float* arranged
) {
    alignas(16) __shared__ float spread[STAGED * GH * ROW + 2];
    alignas(16) __shared__ float kernels[STAGED * K * K * CP];
    int group = threadIdx.x / SIZE, thread = threadIdx.x % SIZE;
    int tile = thread % (TH * TW), first = thread / (TH * TW) * CT;
    int top = tile / TW * 2, left = tile % TW * 2;
    float sums[CT][4];
    #pragma unroll
    for (int c = 0; c < CT; c++)
        for (int i = 0; i < 4; i++) sums[c][i] = 0;
    for (int i = threadIdx.x; i < STAGED * GH * ROW; i += blockDim.x) spread[i] = 0;
    for (int begin = 0; begin < O; begin += STAGED) {
        const float4* staged = (const float4*)(arranged + begin * K * K * CP);
        __syncthreads();
        for (int i = threadIdx.x; i < STAGED * PH * PW; i += blockDim.x) {
            int at = (blockIdx.x * O + begin) * (PH * PW) + i, bits = signs[at];
            float found = grad[at] * 0.25f;
            float* corner = spread + (i / (PH * PW) * GH + i / PW % PH * 2 + K - 1) * ROW + i % PW * 2 + K - 1;
            corner[0] = bits & 1 ? found : 0;
            corner[1] = bits & 2 ? found : 0;
            corner[ROW] = bits & 4 ? found : 0;
            corner[ROW + 1] = bits & 8 ? found : 0;
        }
        for (int i = threadIdx.x; i < STAGED * K * K * CP / 4; i += blockDim.x) ((float4*)kernels)[i] = staged[i];
        __syncthreads();
        for (int o = group; o < STAGED; o += GROUPS) {
            float patch[K + 1][K + 1];
            read<ROW>(patch, spread + (o * GH + top) * ROW + left);
            accumulate<CP, CT>(sums, patch, kernels + o * K * K * CP + first);
        }
    }
#if GROUPS > 1
    add_groups<CT>(sums, kernels, group, thread, SIZE);
#endif
    float* image = out + blockIdx.x * (C * H * W);
    #pragma unroll
    for (int c = 0; c < CT; c++)
        for (int i = 0; i < 4; i++) {
            int y = top + i / 2, x = left + i % 2;
            if (group == 0 && first + c < C && y < H && x < W) image[((first + c) * H + y) * W + x] = sums[c][i];
        }
    for (int i = threadIdx.x; i < C * H * W; i += blockDim.x)  // rows and columns that no pool has used
        if (i / W % H >= 2 * TH || i % W >= 2 * TW) image[i] = 0;
}
"""

WEIGHT_GRADIENTS = """
extern "C" __global__ void weight_gradients(
    float* out, const float* X, const float* grad, const unsigned char* signs, int num_images, int per_block
) {
    __shared__ float image[C * H * W];
    __shared__ float pools[O * PH * PW];
    __shared__ unsigned char positive[O * PH * PW];
    int c = threadIdx.x % C, first = threadIdx.x / C % (O / OW) * OW, row = threadIdx.x / (C * (O / OW));
    float sums[OW][K * K], biases[OW];
    #pragma unroll
    for (int o = 0; o < OW; o++) {
        biases[o] = 0;
        for (int i = 0; i < K * K; i++) sums[o][i] = 0;
    }
    int begin = blockIdx.x * per_block, end = begin + per_block < num_images ? begin + per_block : num_images;
    for (int n = begin; n < end; n++) {
        __syncthreads();
        for (int i = threadIdx.x; i < C * H * W; i += blockDim.x) image[i] = X[n * (C * H * W) + i];
        for (int i = threadIdx.x; i < O * PH * PW; i += blockDim.x) {
            pools[i] = grad[n * (O * PH * PW) + i] * 0.25f;
            positive[i] = signs[n * (O * PH * PW) + i];
        }
        __syncthreads();
        for (int y = 2 * row; y < 2 * PH; y = y % 2 ? y + 2 * ROWS - 1 : y + 1) {
            float window[K][K];  // the columns x to x + K - 1 of the rows y to y + K - 1
            #pragma unroll
            for (int i = 0; i < K; i++)
                #pragma unroll
                for (int j = 0; j < K - 1; j++) window[i][j + 1] = image[(c * H + y + i) * W + j];
            #pragma unroll
            for (int x = 0; x < 2 * PW; x++) {
                #pragma unroll
                for (int i = 0; i < K; i++) {
                    #pragma unroll
                    for (int j = 0; j < K - 1; j++) window[i][j] = window[i][j + 1];
                    window[i][K - 1] = image[(c * H + y + i) * W + x + K - 1];
                }
                #pragma unroll
                for (int o = 0; o < OW; o++) {
                    int at = ((first + o) * PH + y / 2) * PW + x / 2;
                    float found = positive[at] >> (y % 2 * 2 + x % 2) & 1 ? pools[at] : 0;
                    biases[o] += found;
                    #pragma unroll
                    for (int i = 0; i < K * K; i++) sums[o][i] += found * window[i / K][i % K];
                }
            }
        }
    }
#if ROWS > 1
    __shared__ float rows[ROWS][WEIGHTS + O];
    float* chunk = rows[row];
#else
    float* chunk = out + blockIdx.x * (WEIGHTS + O);
#endif
    #pragma unroll
    for (int o = 0; o < OW; o++) {
        for (int i = 0; i < K * K; i++) chunk[(i * O + first + o) * C + c] = sums[o][i];  // neighbours write neighbours
        if (c == 0) chunk[WEIGHTS + first + o] = biases[o];
    }
#if ROWS > 1
    __syncthreads();
    for (int i = threadIdx.x; i < WEIGHTS + O; i += blockDim.x) {
        float total = 0;
        for (int y = 0; y < ROWS; y++) total += rows[y][i];
        out[blockIdx.x * (WEIGHTS + O) + i] = total;
    }
#endif
}
"""

ADDED = """
extern "C" __global__ void added(float* out, const float* chunks, int num_chunks) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= WEIGHTS + O) return;
    float total = 0;
    #pragma unroll 8
    for (int chunk = 0; chunk < num_chunks; chunk++) total += chunks[chunk * (WEIGHTS + O) + at];
    out[at < WEIGHTS ? at % (O * C) * (K * K) + at / (O * C) : at] = total;
}
"""

KERNELS = {
    "arranged": ARRANGED,
    "pooled": ACCUMULATE + ADD_GROUPS + POOLED,
    "input_gradient": ACCUMULATE + ADD_GROUPS + INPUT_GRADIENT,
    "weight_gradients": WEIGHT_GRADIENTS,
    "added": ADDED,
}
