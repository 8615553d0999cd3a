import hashlib, json, shutil
from dataclasses import replace
from pathlib import Path
from ..plan.codec import codec_of
from .manifest import CHUNK_NBYTES, File, Manifest
class BundleWriter:
    def __init__(self, path, shard_nbytes):
        self.path=Path(path); shutil.rmtree(self.path,ignore_errors=True); self.path.mkdir(parents=True); self.files={}; self.shard=shard_nbytes
    def add(self,name,data):
        f=self.path/name; f.parent.mkdir(exist_ok=True,parents=True); f.write_bytes(data)
        self.files[name]=File(len(data),hashlib.sha256(data).hexdigest(),tuple(hashlib.sha256(data[i:i+CHUNK_NBYTES]).hexdigest() for i in range(0,len(data),CHUNK_NBYTES)))
    def add_tensors(self,stem,tensors):
        from safetensors.torch import save
        keep={k:v for k,v in tensors.items() if v.view(-1).view(__import__('torch').uint8).any()} if tensors else {}
        if not keep: return {}
        data=save(keep); name=f"{stem}-00001.safetensors"; self.add(name,data)
        n=int.from_bytes(data[:8],'little'); head=json.loads(data[8:8+n])
        return {k:(name,8+n+head[k]['data_offsets'][0]) for k in keep}
    def finish(self,manifest):
        m=replace(manifest,files=self.files)
        (self.path/'manifest.json').write_text(json.dumps(codec_of(Manifest).encode(m)))
