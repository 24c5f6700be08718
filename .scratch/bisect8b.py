import torch, time, sys
from detcompile import Numerics
import detcompile
from benchmarks.model import build
from benchmarks import model as bm
t0=time.time()
def log(*a): print(f"[{time.time()-t0:5.0f}]",*a,flush=True)
import detcompile.templates.ops
ops=torch.ops.detcompile
torch.manual_seed(0)
def mm():
    for n,k,rad,res in [(6144,4096,[],0),(4096,4096,[2,2,2],1),(12288,4096,[],0),(4096,12288,[2,2,2],1),(1024,4096,[],0),(151936,4096,[],0)]:
        w=(torch.randn(n,k,device="cuda")*0.02).bfloat16(); x=torch.randn(8755,k,device="cuda").bfloat16(); r=torch.randn(8755,n,device="cuda").bfloat16() if res else None
        ref=None; bad=[]
        for m in (515,1,2,12,17,40,65,100,129,200,257,515,600,1030,2060,4100,8755):
            if n>100000 and m>2060: continue
            y=ops.matmul(x[:m],w,None,r[:m] if res else None,rad)
            if ref is None: ref=y.clone(); continue
            c=min(m,515)
            d=(y[:c]!=ref[:c]).sum().item()
            if d: bad.append((m,d))
        log("mm",n,k,rad,"BAD" if bad else "ok",bad)
        del w,x,r
def rows():
    for R in (4096,128):
        x=torch.randn(300000 if R==128 else 8755,R,device="cuda").bfloat16(); w=torch.randn(R,device="cuda").bfloat16()
        ref=ops.rms_norm(x,w,1e-6,True); bad=[m for m in (1,12,515,2060) if not torch.equal(ops.rms_norm(x[:m].clone(),w,1e-6,True),ref[:m])]
        log("rms",R,bad)
def attn():
    D,H,KV=128,32,8
    lens=[515]*17
    from detcompile.runtime.block_pool import BlockPool
    T=sum(lens)
    q=torch.randn(T,H,D,device="cuda").bfloat16(); k=torch.randn(T,KV,D,device="cuda").bfloat16(); v=torch.randn(T,KV,D,device="cuda").bfloat16()
    def run(S, steps, first=0):
        nb=9
        kc=torch.zeros(nb*S,64,KV,D,device="cuda",dtype=torch.bfloat16); vc=kc.clone(); outs=[]; done=0
        bt=torch.arange(nb*S,device="cuda",dtype=torch.int32).view(S,nb)
        for n in steps:
            idx=torch.cat([torch.arange(done,done+n)+s*515 for s in range(S)]).cuda()
            pos=torch.arange(done,done+n).repeat(S).cuda(); seq=torch.arange(S).repeat_interleave(n).cuda()
            slots=(bt[seq.long(),pos//64].long()*64+pos%64)
            cu=torch.arange(S+1,device="cuda",dtype=torch.int32)*n; sl=torch.full((S,),done+n,device="cuda",dtype=torch.int32)
            o=ops.paged_attention(q[idx],k[idx],v[idx],kc,vc,slots,cu,sl,bt,D**-0.5,0,512); outs.append(o[:n]); done+=n
        return torch.cat(outs)
    ref=run(1,[515])
    for S,st in [(1,[515]),(2,[515]),(17,[515]),(1,[514,1]),(1,[500]+[1]*15),(4,[500]+[1]*15),(1,[64]*8+[3]),(1,[511,1,1,1,1]),(17,[511,1,1,1,1]),(1,[129,129,257])]:
        o=run(S,st); d=(o!=ref).sum().item(); log("attn",S,st[:4],d, "rows",(o!=ref).flatten(1).any(1).nonzero().flatten().tolist()[:8])
L=36
from detcompile.verification import *
pass
m=detcompile.compile(build(L)); log("compiled",L,m.certificate.summary())
axes=[a for a in available_axes("cuda") if a!="restart"]
for a in axes:
    r=verify(m,ModelSpec("x"),[a],count=4)[a]; log(a,r.to_json())
