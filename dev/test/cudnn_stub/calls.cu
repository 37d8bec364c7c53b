// calls.cu: llmc/cudnn_attention.cpp as the trainer calls it, with the cuDNN that stands beside this file.
#include "llmc/cudnn_attention.cpp"

int main() {
    program_name = "train_moe_emu";
    CudnnAttentionShape s = {2, 16, 4, 2, 8, 48, 64, 64};
    attention_cudnn_check(false, s.HD);
    cudnn_attention_forward(NULL, NULL, NULL, NULL, NULL, &s, 0);
    cudnn_attention_backward(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, &s, 0);
    puts("done");
}
